"""How several ranks reduce their gradients to those of the whole batch.

one rank     nothing to do
Parallel     DistributedDataParallel: buckets, reduced during the backward pass
Beside       V4: a block's gradients are adjacent in memory, and are reduced on the side branch
             before the block's update
Sharded      FSDP2: each rank gets the gradients of its shards
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tinyllama.harness.kernels.layout import as_one, joined
from tinyllama.harness.kernels.placed import placed
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training.compiled import LossOf
from tinyllama.training.peers import SHARE, PeerGradients
from tinyllama.training.plans import AUTOCAST
from tinyllama.training.ranks import Ranks
from tinyllama.training.shards import local, sharded
from tinyllama.training.sharing import Sharing

LAST = 2  # groups that are reduced during the update of the others


class Reduction:
    """For one rank. loss_of: tokens, targets and tables -> loss, as `TinyLlama.loss_with`.

    share: the gradient of the loss that backward starts with. warm_up: steps before a capture.
    waits: why no reduction runs during the backward pass; None if one does, or if none is needed.
    early: whether gradients `arrive` in parts, which may be updated before the next part is there.
    With ``plain`` set, `loss` neither compiles nor reduces.
    """

    share = 1.0
    warm_up = 0
    waits: str | None = None
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

    def during(self) -> contextlib.AbstractContextManager[None]:
        """The context of each backward pass."""
        return contextlib.nullcontext()

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
        self,
        model: TinyLlama,
        loss_of: LossOf,
        ranks: Ranks,
        sharing: Sharing,
        early: bool = False,
        waits: str | None = None,
    ) -> None:
        super().__init__(model, loss_of)
        self.waits, self.early = waits, early
        device = model.embedding.device
        self._device, self._group = device, None
        size = sharing.bucket_mib
        if size is None:
            size = sum(p.nbytes for p in model.layers[0].parameters()) / 2**20
        # The stream is for a capture: the same notes.
        stream = torch.cuda.Stream(device) if device.type != "cpu" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._ddp = DistributedDataParallel(
                _Loss(model, loss_of),
                process_group=self._group,
                bucket_cap_mb=size,
                gradient_as_bucket_view=True,
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
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
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

    def __init__(self, model: TinyLlama, loss_of: LossOf, ranks: Ranks, sharing: Sharing) -> None:
        super().__init__(model, loss_of)
        self.share = 1 / ranks.count
        self._group = None
        self._reduced: set[int] = set()

    def clear(self) -> None:
        self._reduced.clear()

    def reduce(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self._reduced.update(gradients)
        _sum([gradients[i] for i in sorted(gradients)], self._group)

    def finish(self) -> None:
        rest = [p.grad for i, p in enumerate(self.parameters) if i not in self._reduced]
        there = [gradient for gradient in rest if gradient is not None]
        for matrix in there:
            if matrix.dim() > 1:
                _sum([matrix], self._group)
        _sum([gradient for gradient in there if gradient.dim() == 1], self._group)
        self._reduced.clear()


class _Peers(Reduction):
    """Gradients are summed by copies, in one range for each block and one for all others."""

    def __init__(self, model: TinyLlama, loss_of: LossOf, ranks: Ranks, places: bool) -> None:
        super().__init__(model, loss_of)
        self.share = 1 / ranks.count
        index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._blocks = [
            [index[id(p)] for p in layer.parameters() if p.dim() > 1] for layer in model.layers
        ]
        inside = {i for block in self._blocks for i in block}
        self._rest = [i for i in range(len(self.parameters)) if i not in inside]
        groups = [*self._blocks, self._rest]
        elements = (sum(self.parameters[i].numel() for i in group) for group in groups)
        longest = max(elements) + SHARE * len(self.parameters)
        self._peers = PeerGradients(self.parameters, longest)
        self._places = places
        self._reduces = False
        self._device = model.embedding.device
        self._stream = torch.cuda.Stream(self._device, priority=-1)

    def expect(self, reduce: bool) -> None:
        self._reduces = reduce

    def during(self) -> contextlib.AbstractContextManager[None]:
        if not (self._reduces and self._places):
            return contextlib.nullcontext()
        return placed(self._peers.master, self._peers.flat)

    def _start(self, indices: Iterable[int]) -> torch.cuda.Event:
        """Sum a group on the side, behind all that the current stream has to do."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._peers.sum(*self._peers.range_of(indices))
            event = torch.cuda.Event()
            event.record()
        return event

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def _end(self) -> None:
        """The next gradients must not be written while another rank copies the last sums."""
        with torch.cuda.stream(self._stream):
            self._peers.barrier()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Copied(_Peers):
    """Each block's gradients are summed on a side branch as soon as the last of them is there."""

    warm_up = 3

    def __init__(
        self,
        model: TinyLlama,
        loss_of: LossOf,
        ranks: Ranks,
        places: bool,
        early: bool = False,
        waits: str | None = None,
    ) -> None:
        super().__init__(model, loss_of, ranks, places)
        self.waits, self.early = waits, early
        self._done: list[tuple[list[int], torch.cuda.Event]] = []
        for group in (*self._blocks, self._rest):
            for index in group:
                arrived = partial(self._arrived, index, group)
                self.parameters[index].register_post_accumulate_grad_hook(arrived)

    def expect(self, reduce: bool) -> None:
        super().expect(reduce)
        self._done.clear()
        self._missing = set(range(len(self.parameters)))

    def _arrived(self, index: int, group: list[int], parameter: torch.Tensor) -> None:
        if not self._reduces:
            return
        assert parameter.grad is not None
        parameter.grad = self._peers.keep(index, parameter.grad)
        self._missing.discard(index)
        if self._missing.isdisjoint(group):
            self._done.append((group, self._start(group)))

    def arrive(self) -> Iterator[Mapping[int, torch.Tensor]]:
        if not self.early:
            return
        for part in (self._done[:-LAST], self._done[-LAST:]):
            arrived: dict[int, torch.Tensor] = {}
            for group, event in part:
                self._wait(event)
                arrived |= {i: self._peers.views[i] for i in group}
            if arrived:
                yield arrived

    def finish(self) -> None:
        self._end()
        self._done.clear()


class CopiedBeside(_Peers):
    """`Beside` by copies."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._reduced: set[int] = set()

    def clear(self) -> None:
        self._reduced.clear()

    def reduce(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self._reduced.update(gradients)
        for index, gradient in gradients.items():
            self._peers.keep(index, gradient)
        self._wait(self._start(gradients))

    def finish(self) -> None:
        rest = {i: p for i, p in enumerate(self.parameters) if i not in self._reduced}
        for index, parameter in rest.items():
            if parameter.grad is not None:
                parameter.grad = self._peers.keep(index, parameter.grad)
        self._start(rest)
        self._end()
        self._reduced.clear()


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
    model: TinyLlama,
    config: TrainConfig,
    plan: StepPlan,
    ranks: Ranks,
    loss_of: LossOf,
    sharing: Sharing,
) -> Reduction:
    """The way for this step; made inside `tinyllama.training.step.products`."""
    if ranks.count == 1:
        return Reduction(model, loss_of)
    if sharded(model):
        if sharing != Sharing():
            raise ConfigError(f"shards are reduced by FSDP2 in its own way: leave out {sharing}")
        return Sharded(model, loss_of)
    rows = config.batch_size // ranks.count * config.seq_len
    x_ND = model.embedding.detach()[:1].expand(rows, -1)
    early = sharing.early and updates_in_parts(model, config)
    if sharing.copies:
        places = config.accumulate == 1
        if not model.stacks(x_ND, AUTOCAST.get(config.precision, torch.float32)):
            return Copied(model, loss_of, ranks, places, early)
        if plan.overlap:
            return CopiedBeside(model, loss_of, ranks, places)
        raise ConfigError("not yet")
    if not model.stacks(x_ND, AUTOCAST.get(config.precision, torch.float32)):
        return Parallel(model, loss_of, ranks, sharing, early)
    if plan.overlap:
        return Beside(model, loss_of, ranks, sharing)
    waits = "the gradients of all blocks come at once"
    return Parallel(model, loss_of, ranks, sharing, early, waits)


def updates_in_parts(model: TinyLlama, config: TrainConfig) -> bool:
    """Whether some parameters can be updated before the gradients of others are known."""
    apart = model.tier.table["adamw"] == "triton"
    return apart and config.max_grad_norm is None and config.precision != "fp16"


def _sum(tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each tensor over the ranks, in place; adjacent or small tensors are summed together."""
    if not tensors:
        return
    flat = as_one(*tensors)
    if flat is not None:
        dist.all_reduce(flat, group=group)
        return
    flat = joined(tensors)
    dist.all_reduce(flat, group=group)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, summed in zip(tensors, flat.split(sizes), strict=True):
        tensor.copy_(summed.view(tensor.shape))
