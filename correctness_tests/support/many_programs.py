"""Calls that an op registers for offsets past 2^31 (`Op.rows_apart`, `Op.many_programs`)."""

import importlib
import importlib.util
from collections.abc import Callable

import torch

from tinyllama.harness.check.offsets import APART, addresses_promised, room
from tinyllama.harness.declare.offsets import Pairs, Results, randn
from tinyllama.harness.declare.op import Op
from tinyllama.harness.kernels.programs import ends

FIRST_AND_LAST = [0, -1]


def load(op: Op) -> Op:
    """The op with what its ``offsets.py`` registers, where it is a folder with one."""
    name = f"{op.module}.offsets"
    if op.folder is not None and importlib.util.find_spec(name) is not None:
        importlib.import_module(name)
    return op


def near(x: torch.Tensor, axis: int = 0, stride: int = APART) -> torch.Tensor:
    """A dense copy, in the place of `Far`."""
    return x.clone()


class EndsAlone:
    """Kernels run by the first and the last programs of their grids alone; see
    `tinyllama.harness.declare.offsets.Ends`."""

    room = staticmethod(room)

    def __call__(
        self, call: Callable[..., Results], programs: int, *far: torch.Tensor, both: bool = False
    ) -> Pairs:
        for seed, x in enumerate(far):
            drawn = randn(2, *x.shape[1:], seed=seed).abs()  # AdamW takes a root
            x[FIRST_AND_LAST] = drawn.to(x.dtype) / 3  # in float32 more digits than 16 bits have
        near = [x[FIRST_AND_LAST] for x in far]
        expected = [] if both else call(*near)
        with ends(programs), addresses_promised():
            actual = call(*far)
            expected = expected or call(*near)
        return [(x[FIRST_AND_LAST], y) for x, y in zip(actual, expected, strict=True)]
