"""The rotation at offsets past 2^31."""

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Put, Results, randn, unwritten
from tinyllama.ops.rope import rope, rope_tables, rotate


def _rotated(put: Put, axis: int) -> Results:
    """Of 3 batches, 3 tokens, and 3 heads: one of them is the axis."""
    q, k = (put(randn(3, 3, 3, 8, seed=seed), axis) for seed in range(2))
    q_out, k_out = (put(unwritten(3, 3, 3, 8), axis) for _ in range(2))
    rotate(q, k, *rope_tables(3, 8), q_out, k_out)
    return [q_out, k_out]


@rope.rows_apart
def rotation_of_batches(put: Put) -> Results:
    return _rotated(put, axis=0)


@rope.rows_apart
def rotation_of_tokens(put: Put) -> Results:
    return _rotated(put, axis=1)


@rope.rows_apart
def rotation_of_heads(put: Put) -> Results:
    return _rotated(put, axis=2)


@rope.many_programs
def many_angles(ends: Ends) -> Pairs:
    """A rotation whose tables have 2^31 elements."""
    width = 2**16
    length = 2 * 2**31 // width + 1

    def call(x: torch.Tensor, table: torch.Tensor) -> Results:
        rotate(x[None], None, table, table, x[None], None)
        return [x]

    x = ends.room(length * width).view(length, 1, width)
    return ends(call, 1, x, ends.room(length * width // 2).view(length, -1))
