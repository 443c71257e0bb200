"""Parameters in shards, one for each rank, by PyTorch's FSDP2 (``fully_shard``).

A rank holds its rows of every parameter, of its gradient and of both moments, as a DTensor whose
local tensor the optimizer updates. A block's parameters are gathered before it runs, and freed
afterwards.
"""

from typing import Any

import torch

from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.training.ranks import Ranks


def shard(model: TinyLlama, config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Split a model on the CPU over the ranks, and move each rank's shards to its device.

    Raises ConfigError for what needs whole parameters, or all of their gradients on each rank.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if ranks.count == 1:
        raise ConfigError("one rank has nothing to shard: start several with torchrun")
    if model.stack is not None:
        raise ConfigError(
            f"tier {model.tier.name} reads the weights of all blocks where they adjoin in one "
            "memory, and shards do not: use tier v3, or no shards"
        )
    if config.precision == "fp16":
        raise ConfigError(
            "precision fp16 looks for gradients that overflow, and a rank sees its shards only: "
            "use precision bf16, or no shards"
        )
    mesh = init_device_mesh(device.type, (ranks.count,))
    sums = torch.bfloat16 if config.reduce_in == "bf16" else None
    policy = MixedPrecisionPolicy(reduce_dtype=sums)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "loss_with")


def in_shards(tensor: torch.Tensor | None) -> bool:
    """Whether it is a DTensor, without importing that package, which takes long."""
    return hasattr(tensor, "placements")


def sharded(model: TinyLlama) -> bool:
    """Whether the parameters of a model are in shards."""
    return in_shards(model.embedding)


def local(tensor: Any) -> torch.Tensor:
    """The memory of this rank's shard; of a whole tensor, itself."""
    memory: torch.Tensor = tensor.to_local().detach() if in_shards(tensor) else tensor
    return memory


def full_tensor(mine: torch.Tensor, like: Any) -> torch.Tensor:
    """The whole tensor of which ``mine`` is this rank's shard, if ``like`` is in shards. All ranks
    call it together."""
    if not in_shards(like):
        return mine
    from torch.distributed.tensor import DTensor

    place: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
    gathered = DTensor.from_local(mine, like.device_mesh, like.placements, run_check=False, **place)
    return gathered.full_tensor()


def part(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's shard of a whole tensor, if ``like`` is in shards."""
    if not in_shards(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    split = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return split.to_local()
