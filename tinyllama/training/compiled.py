"""The compiled loss of a step: one graph on one rank, a graph for each block on several.

Of one graph the gradients of all blocks arrive at once, and no reduction could run beside the
backward pass. DistributedDataParallel would split the graph at its buckets, most of which end
inside a block; each of the many parts is compiled alone and fuses nothing across its borders. One
graph of a block serves all blocks, with whole parameters and with shards.
"""

from functools import partial
from typing import Any

import torch

from tinyllama.model.llama import TinyLlama
from tinyllama.training.ranks import Ranks
from tinyllama.training.reduction import LossOf

_compile = partial(torch.compile, dynamic=False, fullgraph=True)


def compiled(model: TinyLlama, ranks: Ranks) -> LossOf:
    """`TinyLlama.loss_with`, compiled for so many ranks."""
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
