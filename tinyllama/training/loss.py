"""The loss of a step as a function: compiled, and over several ranks with gradients reduced by
DistributedDataParallel during the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tinyllama.model.llama import TinyLlama
from tinyllama.training.ranks import Ranks

LossOf = Callable[..., torch.Tensor]  # tokens, targets and tables -> loss
WARM_UP = 11  # steps before a capture, as PyTorch's notes on CUDA graphs require with DDP

_compile = partial(torch.compile, dynamic=False, fullgraph=True)


def compiled(model: TinyLlama, ranks: Ranks) -> LossOf:
    """`TinyLlama.loss_with`, compiled: one graph on one rank, a graph for each block on several.

    Of one graph the gradients of all blocks arrive at once, and no reduction could run beside the
    backward pass. DistributedDataParallel would split the graph at its buckets, most of which end
    inside a block; each of the many parts is compiled alone and fuses nothing across its borders.
    One graph of a block serves all blocks, with whole parameters and with shards.
    """
    return _compile(model.loss_with) if ranks.count == 1 else _ByParts(model)


class _ByParts:
    """Each block, the last norm and the loss are compiled alone."""

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


def parallel(model: TinyLlama, loss_of: LossOf) -> DistributedDataParallel:
    """The loss whose backward pass reduces the gradients in buckets, one for each block, which are
    the parameters' ``grad``."""
    device = model.embedding.device
    size = sum(p.nbytes for p in model.layers[0].parameters()) / 2**20
    # A capture needs a side stream here, as PyTorch's notes on CUDA graphs require.
    stream = torch.cuda.Stream(device) if device.type != "cpu" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        module = _Loss(model, loss_of)
        ddp = DistributedDataParallel(module, bucket_cap_mb=size, gradient_as_bucket_view=True)
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream)
    return ddp
