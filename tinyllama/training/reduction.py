"""How several ranks reduce their gradients to those of the whole batch.

one rank     nothing to do
Parallel     DistributedDataParallel: buckets, reduced during the backward pass
Beside       V4: a block's gradients are adjacent in memory, and are reduced on the side branch
             before the block's update
Sharded      FSDP2: each rank gets the gradients of its shards
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tinyllama.harness.kernels.layout import as_one, joined
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training.plans import AUTOCAST
from tinyllama.training.ranks import Ranks
from tinyllama.training.shards import local, sharded

LossOf = Callable[..., torch.Tensor]  # tokens, targets and tables -> loss


class Reduction:
    """The reduction of one rank, which has nothing to do.

    share: the gradient of the loss that backward starts with. warm_up: steps before a capture.
    With ``bypassed`` set, `loss` neither compiles nor reduces.
    """

    share = 1.0
    warm_up = 0

    def __init__(self, model: TinyLlama, loss_of: LossOf) -> None:
        self.model = model
        self.bypassed = False
        self._loss_of = loss_of
        self.parameters: list[torch.Tensor] = list(model.parameters())

    def loss(self, *batch: Any) -> torch.Tensor:
        return (self.model.loss_with if self.bypassed else self._loss_of)(*batch)

    def expect(self, reduce: bool) -> None:
        """Called before each forward pass. reduce: its backward pass completes the gradients."""

    def clear(self) -> None:
        """Called before a step's first forward pass: free gradients that the optimizer lacks."""

    def reduce(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Reduce some gradients, by their parameter's index, on the current stream."""

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
    """DistributedDataParallel, whose buckets, one for each block, hold the gradients."""

    warm_up = 11  # as PyTorch's notes on CUDA graphs require

    def __init__(self, model: TinyLlama, loss_of: LossOf) -> None:
        super().__init__(model, loss_of)
        device = model.embedding.device
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

    def loss(self, *batch: Any) -> torch.Tensor:
        return super().loss(*batch) if self.bypassed else self._ddp(*batch)

    def expect(self, reduce: bool) -> None:
        self._ddp.require_backward_grad_sync = reduce


class Beside(Reduction):
    """The reduction of a step that updates blocks during the backward pass: gradients are summed,
    and each rank's loss counts for its share."""

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
        gradients = [gradient for gradient in rest if gradient is not None]
        for gradient in gradients:
            if gradient.dim() > 1:
                _sum([gradient])
        _sum([gradient for gradient in gradients if gradient.dim() == 1])


class Sharded(Reduction):
    """Every micro-batch reduces its gradients, so that no rank has all of them."""

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
    """How this step reduces, and the reasons for what is left out; to be called inside
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
    return Parallel(model, loss_of), left_out


def _sum(tensors: list[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place; adjacent or small tensors are summed together."""
    if not tensors:
        return
    adjacent = as_one(*tensors)
    if adjacent is not None:
        dist.all_reduce(adjacent)
        return
    copy = joined(tensors)
    dist.all_reduce(copy)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, summed in zip(tensors, copy.split(sizes), strict=True):
        tensor.copy_(summed.view(tensor.shape))
