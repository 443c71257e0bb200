"""Every op of a model, called through a function that watches it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tinyllama.model.llama import TinyLlama
from tinyllama.ops.block import PARTS, compose

Call = Callable[..., Any]
STACK = "stack"  # all blocks as one op


@contextlib.contextmanager
def wrapped_ops(model: TinyLlama, wrap: Callable[[str, Call], Call]) -> Iterator[None]:
    """Replace each op of a model by ``wrap(name, op)`` in this context.

    The names are ``embedding``, ``layers.0.qkv`` (where a block is composed of ops),
    ``layers.0.block``, `STACK`, ``final_norm`` and ``loss``.
    """
    layers: list[Any] = list(model.layers)
    table = model.tier.providers()
    rows, norm, loss_of, stack = model.rows, model.norm, model.loss_of, model.stack
    blocks = [layer.compute for layer in layers]
    model.rows, model.norm = wrap("embedding", rows), wrap("final_norm", norm)
    model.loss_of = wrap("loss", loss_of)
    model.stack = None if stack is None else wrap(STACK, stack)
    for index, layer in enumerate(layers):
        block = layer.compute
        if "block" not in table:
            block = compose({op: wrap(f"layers.{index}.{op}", table[op]) for op in PARTS})
        layer.compute = wrap(f"layers.{index}.block", block)
    try:
        yield
    finally:
        model.rows, model.norm, model.loss_of, model.stack = rows, norm, loss_of, stack
        for layer, block in zip(layers, blocks, strict=True):
            layer.compute = block
