"""The stack's kernels at offsets past 2^31."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Results, randn
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops.attention import FARTHEST_ROW
from tinyllama.ops.rope import rope_tables
from tinyllama.ops.stack import launches, stack
from tinyllama.ops.stack.configs import DOWN, MLP_GRADIENT
from tinyllama.ops.stack.in_one import attend

EPS, WIDTH = 1e-5, 32
ROWS = 2**31 // WIDTH + 2
TALL = 2**31 // FARTHEST_ROW + 64  # columns of a transpose
PARTS = torch.float32


def _tiles(**sizes: int) -> Any:
    """Every product in tiles of these sizes."""
    config = Config(**{"GROUP": 8, **sizes}, DESCRIBED=0, num_warps=4, num_stages=1)
    return mock.patch.object(launches, "_chosen", return_value=config)


@stack.many_programs
def many_rows(ends: Ends) -> Pairs:
    """Each product but those of the weights' gradients, and rows that are folded."""
    w, wide, gain = randn(WIDTH, WIDTH), randn(2 * WIDTH, WIDTH, seed=1), randn(WIDTH, seed=2)
    cos, sin = rope_tables(4, 8)

    def call(x: torch.Tensor, dy: torch.Tensor) -> Results:
        n = len(x)
        squares, rstd = x.new_ones((n, 1), dtype=PARTS), x.new_ones(n, dtype=PARTS)
        low, qkv, h, total, dx = (torch.empty_like(x) for _ in range(5))
        gate_up, dgate_up = x.new_empty((n, 2 * WIDTH)), x.new_empty((n, 2 * WIDTH))
        launches.project(x, w, squares, rstd, cos, sin, qkv, rotated=16, eps=EPS)
        launches.gate(x, wide, squares, rstd, gate_up, h, EPS)
        sums = launches.add_product(DOWN, x, w, dy, total, gain, low)
        parts = launches.hidden_gradient(dy, w, gate_up, rstd, dgate_up)
        tiles = launches.tile_rows(MLP_GRADIENT, dy, WIDTH)
        launches.norm_gradient(
            *(MLP_GRADIENT, dy, w, squares, rstd, x, gain, dy, dx),
            *(None, x.new_empty((tiles, WIDTH), dtype=PARTS)),
        )
        product = launches.input_product(dy, w)
        return [qkv, gate_up, h, sums, total, low, dgate_up, parts, dx, product]

    def attended(x: torch.Tensor) -> Results:
        n, tokens = x.shape[:2]  # one head
        squares = x.new_ones((n * tokens, 1), dtype=PARTS)
        rstd = x.new_empty(n * tokens, dtype=PARTS)
        qkv, o = x.new_empty((n, tokens, 96)), x.new_empty((n, tokens, WIDTH))
        matrices, tables = randn(96, WIDTH), rope_tables(tokens, WIDTH)
        lse = x.new_empty((n, 1, tokens), dtype=PARTS)
        config, ahead = Config(BK=32, DESCRIBED=0), (x.flatten(0, 1), matrices, squares, rstd)
        attend(config, *ahead, *tables, qkv, o, lse, EPS)
        return [qkv, o, lse]

    def folded(x: torch.Tensor) -> Results:
        low = torch.empty_like(x)
        # Times the programs they are more than 32 bits hold.
        counters = torch.ones(2**15, dtype=torch.int32)
        squares = launches.fold(x, randn(x.shape[1]), low, counters=counters)
        assert squares is not None
        return [squares, low]

    far = (ends.room(ROWS * WIDTH).view(ROWS, -1) for _ in range(2))
    few = ends.room(2**31 + 2**15).view(-1, 2**14)
    with _tiles(BM=2**12, BN=64, BK=32):
        sequences = ends.room(2**31 + 2**15).view(-1, 2**10, WIDTH)
        return [*ends(call, 1, *far), *ends(folded, 1, few), *ends(attended, 1, sequences)]


@stack.many_programs
def many_tokens(ends: Ends) -> Pairs:
    """The first of the weights' gradients and the last: sums over all tokens. Addresses go from
    token to token, by steps that 32 bits hold."""
    many, few = 2**12, 2
    tokens = 2**31 // many + 2

    def call(
        dqkv: torch.Tensor, low: torch.Tensor, o: torch.Tensor, gates: torch.Tensor, h: torch.Tensor
    ) -> Results:
        dys, xs = (dqkv, low, gates, low), (low, o, low, h)
        dws = [torch.empty(dy.shape[1], x.shape[1]) for dy, x in zip(dys, xs, strict=True)]
        launches.weight_gradients(list(zip(dys, xs, dws, strict=True)))
        return [dws[0][[0, 1], :16], dws[3][[-2, -1], -16:]]

    pairs = []
    with _tiles(BM=16, BN=16, BK=2**10):
        for width, other_width in ((few, many), (many, few)):
            sizes = (other_width, width, other_width, 2 * other_width, other_width)
            far = (ends.room(tokens * n).view(tokens, n) for n in sizes)
            pairs += ends(call, 1, *far, both=True)
    return pairs


@stack.many_programs
def many_columns_of_transposes(ends: Ends) -> Pairs:
    """What is stored a second time, as its transpose: of so many rows as it is tried for, made of
    few columns, which the kernels read."""
    w, wide, gain = randn(TALL, WIDTH), randn(2 * TALL, WIDTH, seed=1), randn(TALL, seed=2)
    cos, sin = rope_tables(4, 8)

    def call(x: torch.Tensor, like: torch.Tensor) -> Results:
        n, back = len(x), w.T.contiguous()
        squares, rstd = x.new_ones((n, 1), dtype=PARTS), x.new_ones(n, dtype=PARTS)
        low, qkv, h, total, dx = (torch.empty_like(like) for _ in range(5))
        gate_up, dgate_up = x.new_empty((n, 2 * TALL)), x.new_empty((n, 2 * TALL))
        turned = [x.new_empty((rows * TALL, n)) for rows in (1, 1, 1, 2, 1, 1)]
        of_qkv, of_h, of_low, of_gates, of_dx, of_product = turned
        launches.project(x, w, squares, rstd, cos, sin, qkv, 16, EPS, of_qkv)
        launches.gate(x, wide, squares, rstd, gate_up, h, EPS, of_h)
        launches.add_product(DOWN, x, w, like, total, gain, low, of_low)
        launches.hidden_gradient(x, back, gate_up, rstd, dgate_up, dgate_up_UN=of_gates)
        tiles = launches.tile_rows(MLP_GRADIENT, x, TALL)
        launches.norm_gradient(
            *(MLP_GRADIENT, x, back, squares, rstd, like, gain, like, dx),
            *(None, x.new_empty((tiles, TALL), dtype=PARTS)),
            dx_DN=of_dx,
        )
        launches.input_product(x, back, dx_DN=of_product)
        return [transpose.T for transpose in turned]

    rows = FARTHEST_ROW - 2  # the last one has the position of the second
    with _tiles(BM=2**10, BN=64, BK=64, GROUP=1):
        far = (ends.room(rows * columns).view(-1, columns) for columns in (WIDTH, TALL))
        return ends(call, 2 * TALL // 64, *far)
