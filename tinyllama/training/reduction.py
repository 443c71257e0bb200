"""How several ranks reduce their gradients to those of the whole batch.

one rank     nothing to do
Parallel     DistributedDataParallel: buckets, reduced during the backward pass
Beside       V4: a block's gradients are adjacent in memory, and are reduced on the side branch
             before the block's update
Sharded      FSDP2: each rank gets the gradients of its shards
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tinyllama.harness.kernels.layout import as_one, joined
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.ops import OPS
from tinyllama.training.compiled import LossOf
from tinyllama.training.plans import AUTOCAST
from tinyllama.training.ranks import Ranks
from tinyllama.training.shards import local, sharded

LAST = 2  # groups of gradients that are reduced while those before them are used


class Reduction:
    """For one rank. loss_of: tokens, targets and tables -> loss, as `TinyLlama.loss_with`.

    share: the gradient of the loss that backward starts with. warm_up: steps before a capture.
    early: whether gradients `arrive` in parts, which may be updated before the next part is there.
    With ``plain`` set, `loss` neither compiles nor reduces.
    """

    share = 1.0
    warm_up = 0
    early = False

    def __init__(self, model: TinyLlama, loss_of: LossOf) -> None:
        self.model = model
        self.plain = False
        self._loss_of = loss_of
        self.parameters: list[torch.Tensor] = list(model.parameters())

    def loss(self, *batch: Any) -> torch.Tensor:
        return (self.model.loss_with if self.plain else self._loss_of)(*batch)

    def expect(self, reduce: bool) -> None:
        """Called before each forward pass. reduce: its backward pass completes the gradients."""

    def clear(self) -> None:
        """Called before a step's first forward pass: free gradients that the optimizer lacks."""

    def reduce(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Reduce some gradients, by their parameter's index, on the current stream."""

    def arrive(self) -> Iterator[Mapping[int, torch.Tensor]]:
        """Gradients that the current stream may use now, by their parameter's index, in parts."""
        return iter(())

    def finish(self) -> None:
        """Called after the last backward pass; then gradients are those of the whole batch."""

    def clip(self, limit: float) -> torch.Tensor:
        """Scale the gradients down to a norm, and return the norm before."""
        return nn.utils.clip_grad_norm_(self.parameters, limit)


class _Loss(nn.Module):
    """The loss as a module, as DistributedDataParallel takes it."""

    def __init__(self, model: TinyLlama, loss_of: LossOf) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss_of

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.loss_of(*batch)


class Parallel(Reduction):
    """DistributedDataParallel, whose buckets hold the gradients.

    With ``early``, gradients are summed, and the last buckets are waited for after the update of
    the others.
    """

    warm_up = 11  # as PyTorch's notes on CUDA graphs require

    def __init__(
        self, model: TinyLlama, loss_of: LossOf, ranks: Ranks, early: bool = False
    ) -> None:
        super().__init__(model, loss_of)
        self.early = early
        device = model.embedding.device
        self._device = device
        size = sum(p.nbytes for p in model.layers[0].parameters()) / 2**20
        # The stream is for a capture: the same notes.
        stream = torch.cuda.Stream(device) if device.type != "cpu" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._ddp = DistributedDataParallel(
                _Loss(model, loss_of), bucket_cap_mb=size, gradient_as_bucket_view=True
            )
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)
        self._index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._works: list[tuple[Any, dict[int, torch.Tensor]]] = []
        if early:
            self.share = 1 / ranks.count
            self._ddp.register_comm_hook(None, lambda _, bucket: self._started(bucket))

    def loss(self, *batch: Any) -> torch.Tensor:
        return super().loss(*batch) if self.plain else self._ddp(*batch)

    def expect(self, reduce: bool) -> None:
        self._works.clear()
        self._ddp.require_backward_grad_sync = reduce

    def _started(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket, and tell DistributedDataParallel that it is done: `arrive` waits."""
        gradients = bucket.buffer()
        work = dist.all_reduce(gradients, async_op=True)
        parameters = {self._index[id(p)]: p for p in bucket.parameters()}
        self._works.append((work, parameters))
        on_device: list[Any] = [] if self._device.type == "cpu" else [self._device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=on_device)
        done.set_result(gradients)
        return done

    def arrive(self) -> Iterator[Mapping[int, torch.Tensor]]:
        for part in (self._works[:-LAST], self._works[-LAST:]):
            arrived: dict[int, torch.Tensor] = {}
            for work, parameters in part:
                work.wait()
                for index, parameter in parameters.items():
                    assert parameter.grad is not None, index
                    arrived[index] = parameter.grad
            if arrived:
                yield arrived
        self._works.clear()


class Beside(Reduction):
    """For a step that updates blocks during the backward pass. Gradients are summed."""

    def __init__(self, model: TinyLlama, loss_of: LossOf, ranks: Ranks) -> None:
        super().__init__(model, loss_of)
        self.share = 1 / ranks.count
        self._reduced: set[int] = set()

    def clear(self) -> None:
        self._reduced.clear()

    def reduce(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self._reduced.update(gradients)
        _sum([gradients[i] for i in sorted(gradients)])

    def finish(self) -> None:
        rest = [p.grad for i, p in enumerate(self.parameters) if i not in self._reduced]
        there = [gradient for gradient in rest if gradient is not None]
        for matrix in there:
            if matrix.dim() > 1:
                _sum([matrix])
        _sum([gradient for gradient in there if gradient.dim() == 1])


class Sharded(Reduction):
    """Every micro-batch reduces its gradients, so that no rank holds whole ones."""

    def __init__(self, model: TinyLlama, loss_of: LossOf) -> None:
        super().__init__(model, loss_of)
        self._shards = self.parameters
        self.parameters = [local(parameter) for parameter in self._shards]

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def finish(self) -> None:
        for mine, shard in zip(self.parameters, self._shards, strict=True):
            mine.grad = None if shard.grad is None else local(shard.grad)

    def clip(self, limit: float) -> torch.Tensor:
        norm: Any = nn.utils.clip_grad_norm_(self._shards, limit)
        return norm.full_tensor()


def reduction_of(
    model: TinyLlama, config: TrainConfig, plan: StepPlan, ranks: Ranks, loss_of: LossOf
) -> tuple[Reduction, dict[str, str]]:
    """How this step reduces, and the reasons for what is left out; made inside
    `tinyllama.training.step.products`."""
    if ranks.count == 1:
        return Reduction(model, loss_of), {}
    if sharded(model):
        return Sharded(model, loss_of), {}
    rows = config.batch_size // ranks.count * config.seq_len
    x_ND = model.embedding.detach()[:1].expand(rows, -1)
    left_out: dict[str, str] = {}
    if model.stacks(x_ND, AUTOCAST.get(config.precision, torch.float32)):
        if plan.overlap:
            return Beside(model, loss_of, ranks), left_out
        left_out["overlapped reduction"] = "the gradients of all blocks come at once"
    return Parallel(model, loss_of, ranks, updates_in_parts(model, config)), left_out


def updates_in_parts(model: TinyLlama, config: TrainConfig) -> bool:
    """Whether some parameters can be updated before the gradients of others are known."""
    on_device = not OPS["adamw"][model.tier.table["adamw"]].counts_on_host
    return on_device and config.max_grad_norm is None and config.precision != "fp16"


def _sum(tensors: list[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place; adjacent or small tensors are summed together."""
    if not tensors:
        return
    flat = as_one(*tensors)
    if flat is not None:
        dist.all_reduce(flat)
        return
    flat = joined(tensors)
    dist.all_reduce(flat)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, summed in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(summed.view(tensor.shape))
