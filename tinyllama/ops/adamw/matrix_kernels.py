"""AdamW of four matrices that also writes their transposes, by tiles (ROWS COLUMNS)."""

import itertools
from collections.abc import Sequence

import torch

from tinyllama.harness.kernels import cdiv, jit, processors_of, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_one, joined
from tinyllama.harness.kernels.precision import SHORT
from tinyllama.ops.adamw.kernels import State, _check, _elements

# PROGRAMS: for each processor.
MATRICES, MATRICES_BESIDE = (
    Space(
        f"adamw.{name}",
        default=lambda grad, programs=programs: Config(
            ROWS=32, COLUMNS=32, PROGRAMS=programs, num_warps=4
        ),
        configs=lambda grad: [
            Config(ROWS=rows, COLUMNS=columns, PROGRAMS=programs, num_warps=4)
            for rows, columns in ((32, 32), (32, 64), (64, 32))
            for programs in (1, 2, 4, 8, 16)
        ],
    )
    for name, programs in (("matrices", 16), ("matrices_beside", 1))
)


@jit
def _choose(tile, end_1, end_2, end_3, a, b, c, d):
    """Of a, b, c and d the one of the first end that is above ``tile``; d if none is."""
    return tl.where(tile < end_1, a, tl.where(tile < end_2, b, tl.where(tile < end_3, c, d)))


@jit
def _update_matrices(
    factors, found_inf, param, grad, exp_avg, exp_avg_sq, transposes, rest1, beta2, rest2, eps,
    rows_1, rows_2, rows_3, rows_4, columns_1, columns_2, columns_3, columns_4,
    end_1, end_2, end_3, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Update four matrices, dense and behind each other, and write the transpose of each at its
    place in ``transposes``. end_1 to end_3: of the tiles of the first three; EVEN: tiles divide all
    sizes. A program goes on to other tiles."""
    if tl.load(found_inf) == 0:
        size_1, size_2, size_3 = rows_1 * columns_1, rows_2 * columns_2, rows_3 * columns_3
        i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            n_rows = _choose(tile, end_1, end_2, end_3, rows_1, rows_2, rows_3, rows_4)
            n_columns = _choose(
                tile, end_1, end_2, end_3, columns_1, columns_2, columns_3, columns_4
            )
            start = _choose(
                tile, end_1, end_2, end_3, 0, size_1, size_1 + size_2, size_1 + size_2 + size_3
            )
            inside = tile - _choose(tile, end_1, end_2, end_3, 0, end_1, end_2, end_3)
            across = tl.cdiv(n_columns, COLUMNS)
            row, column = inside // across * ROWS, inside % across * COLUMNS
            at = tl.cast(start, tl.int64) + (row + i) * n_columns + (column + j)
            turned = tl.cast(start, tl.int64) + (column + j) * n_rows + (row + i)
            there = None
            if not EVEN:
                there = (row + i < n_rows) & (column + j < n_columns)
            _elements(
                param + at, grad + at, exp_avg + at, exp_avg_sq + at, transposes + turned,
                factors, there, rest1, beta2, rest2, eps,
            )  # fmt: skip


def update_matrices(
    state: State,
    shapes: Sequence[tuple[int, int]],
    transposes: torch.Tensor,
    factors: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    few_programs: bool = False,
) -> None:
    """What `update` does, to four matrices of these shapes (rows, columns), behind each other in
    memory (up to 2^31 elements), and into ``transposes``, flat, the transpose of each at its place.
    factors: what `count` gave for this step. few_programs: as in `update`.

    Raises ValueError for tensors that do not match."""
    sizes = [p.numel() for p in state.param]
    _check(state, sizes)
    total = sum(rows * columns for rows, columns in shapes)
    spans = [as_one(*tensors) for tensors in (state.param, state.exp_avg, state.exp_avg_sq)]
    fits = sum(sizes) == total == transposes.numel() < 2**31
    if any(span is None for span in spans) or not fits:
        raise ValueError(
            f"adamw: parameters or states are not matrices {shapes} behind each other in memory, "
            "or there is no room for their transposes, or they have 2^31 elements or more: update "
            "them without transposes"
        )
    if not total:
        return
    param, exp_avg, exp_avg_sq = spans
    space = MATRICES_BESIDE if few_programs else MATRICES
    config = space.choose(transposes.device, grad=SHORT[state.grad[0].dtype])
    options = config.kwargs()
    height, breadth = config["ROWS"], config["COLUMNS"]
    counts = [cdiv(rows, height) * cdiv(columns, breadth) for rows, columns in shapes]
    *ends, tiles = itertools.accumulate(counts)
    programs = min(tiles, options.pop("PROGRAMS") * processors_of(transposes.device))
    _update_matrices[(programs,)](
        *(factors, state.found_inf, param, joined(state.grad), exp_avg, exp_avg_sq, transposes),
        *(1 - beta1, beta2, 1 - beta2, eps),
        *(rows for rows, _ in shapes),
        *(columns for _, columns in shapes),
        *(*ends, tiles),
        EVEN=not any(rows % height or columns % breadth for rows, columns in shapes),
        **options,
    )
