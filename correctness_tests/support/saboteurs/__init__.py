"""Saboteurs: right implementations changed in one thing, and the checks that must find each.

The faults are those that real kernels had and those by which benchmarks were cheated. A fault of
the calling (strides, aliasing, streams, caches) is put on every op that it fits (`calling`); so are
results that are off by a little (`values`); one of the arithmetic belongs to its op (`arithmetic`).
"""

from collections.abc import Iterator

from correctness_tests.support.saboteurs import arithmetic, calling, values
from correctness_tests.support.saboteurs.base import EAGER, OF_ARITHMETIC, Saboteur, of_calling
from tinyllama.ops import OPS

__all__ = ["EAGER", "Saboteur", "arithmetic", "calling", "everyone", "values"]


def everyone() -> Iterator[Saboteur]:
    yield from OF_ARITHMETIC
    for op in OPS.values():
        yield from values.of_values(op)
        if op.differentiable:
            yield from of_calling(op)
