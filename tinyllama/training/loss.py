"""The loss of a step as a function: compiled, and over several ranks with gradients that the
backward pass reduces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training.plans import AUTOCAST
from tinyllama.training.ranks import Ranks
from tinyllama.training.shards import sharded

LossOf = Callable[..., torch.Tensor]  # tokens, targets and tables -> loss
_compile = partial(torch.compile, dynamic=False, fullgraph=True)


class StepLoss:
    """The loss of a batch, by a plan and for so many ranks; to be made inside
    `tinyllama.training.step.products`.

    sums: whether the update sums the gradients over the ranks; else the backward pass reduces them.
    warm_up: steps before a capture. left_out: what is left out for several ranks, and why.
    """

    def __init__(self, model: TinyLlama, config: TrainConfig, plan: StepPlan, ranks: Ranks) -> None:
        self.model = model
        self.left_out: dict[str, str] = {}
        self.sums, self.warm_up = False, 0
        self._ddp: DistributedDataParallel | None = None
        self._loss_of: LossOf = model.loss_with
        if plan.compile and ranks.count == 1:
            self._loss_of = _compile(model.loss_with)
        elif plan.compile:
            self._loss_of = _CompiledParts(model)
            self.left_out["one compiled graph"] = "blocks are reduced one by one"
        if ranks.count == 1 or sharded(model):
            return
        rows = config.batch_size // ranks.count * config.seq_len
        x_ND = model.embedding.detach()[:1].expand(rows, -1)
        stacks = model.stacks(x_ND, AUTOCAST.get(config.precision, torch.float32))
        self.sums = stacks and plan.overlap
        if self.sums:
            return
        if stacks:
            self.left_out["overlapped reduction"] = "the gradients of all blocks come at once"
        self._loss_of = self._ddp = _parallel(model, self._loss_of, config.reduce_in)
        self.warm_up = 11  # as PyTorch's notes on CUDA graphs require with this module

    def __call__(self, *batch: Any, uncompiled: bool, reduce: bool) -> torch.Tensor:
        """The loss of tokens, targets and rotary tables. uncompiled: neither compiled nor reduced.
        reduce: its backward pass completes the gradients of the whole batch."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = reduce
        return self.model.loss_with(*batch) if uncompiled else self._loss_of(*batch)


class _CompiledParts:
    """`TinyLlama.loss_with` with each block, the last norm and the loss compiled alone, for several
    ranks: of one graph all gradients would arrive at once.

    DistributedDataParallel would split one graph at its buckets, most of which end inside a block;
    each of the many parts is compiled alone and fuses nothing across its borders. One graph of a
    block serves all blocks, with whole parameters and with shards.
    """

    def __init__(self, model: TinyLlama) -> None:
        self._model = model
        block: LossOf = model.layers[0].compute  # type: ignore[assignment]
        self._uncompiled = block, model.norm, model.loss_of
        self._compiled = _compile(block), _compile(model.norm), _compile(model.loss_of)

    def __call__(self, *batch: Any) -> torch.Tensor:
        import torch._dynamo.config as dynamo

        self._use(*self._compiled)
        try:
            with dynamo.patch(optimize_ddp=False):  # else it splits a block at the buckets
                return self._model.loss_with(*batch)
        finally:
            self._use(*self._uncompiled)

    def _use(self, block: LossOf, norm: LossOf, loss_of: LossOf) -> None:
        self._model.norm, self._model.loss_of = norm, loss_of
        for layer in self._model.layers:
            layer.compute = block  # type: ignore[assignment]


class _Loss(nn.Module):
    """The loss as a module, as DistributedDataParallel takes it."""

    def __init__(self, model: TinyLlama, loss_of: LossOf) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss_of

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.loss_of(*batch)


def _parallel(model: TinyLlama, loss_of: LossOf, reduce_in: str) -> DistributedDataParallel:
    """Wrap a loss so that gradients are reduced in buckets, one for each block, which hold them."""
    device = model.embedding.device
    size = sum(p.nbytes for p in model.layers[0].parameters()) / 2**20
    # A capture needs a side stream here, as PyTorch's notes on CUDA graphs require.
    stream = torch.cuda.Stream(device) if device.type != "cpu" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        module = _Loss(model, loss_of)
        ddp = DistributedDataParallel(module, bucket_cap_mb=size, gradient_as_bucket_view=True)
        if reduce_in == "bf16":
            ddp.register_comm_hook(None, _rounded_mean)
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream)
    return ddp


def _rounded_mean(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket's gradients over the ranks, which are sent in bfloat16: as PyTorch's
    ``bf16_compress_hook``, which refuses gloo."""
    gradients = bucket.buffer()
    sent = gradients.bfloat16().div_(dist.get_world_size())
    reduced = dist.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda done: gradients.copy_(done.value()[0]))
