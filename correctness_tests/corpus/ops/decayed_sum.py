"""Sums of each row that decay, y = x + factor (the y before), by an associative scan: along rows
from their first element, and along columns from their last one."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import uniform


@triton.jit
def recur(factor, total, next_factor, next_total):
    return factor * next_factor, next_factor * total + next_total


@triton.jit
def scan_kernel(x, factor, forward, backward, N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = (row < N) & (column < D)
    value = tl.load(x + row * D + column, mask=mask, other=0.0)
    decay = tl.load(factor + row * D + column, mask=mask, other=0.0)
    _, along_rows = tl.associative_scan((decay, value), 1, recur)
    _, along_columns = tl.associative_scan((decay, value), 0, recur, reverse=True)
    tl.store(forward + row * D + column, along_rows, mask=mask)
    tl.store(backward + row * D + column, along_columns, mask=mask)


op = Op(
    "corpus_decayed_sum",
    inputs={"x": Tensor("N D"), "factor": Tensor("N D", values=uniform(0.0, 1.0))},
    outputs={"forward": "N D", "backward": "N D"},
    cases=[Case(N=4, D=8), Case(N=3, D=11, why="sizes that are no powers of two")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, factor):
    forward, backward = [x[:, 0]], [x[-1]]
    for column in range(1, x.shape[1]):
        forward.append(x[:, column] + factor[:, column] * forward[-1])
    for row in reversed(range(len(x) - 1)):
        backward.append(x[row] + factor[row] * backward[-1])
    return torch.stack(forward, 1), torch.stack(backward[::-1])


def small(dims):
    return None if max(dims.values()) <= 96 else "use up to 96 rows and columns"


@op.provider("triton", requires=("triton",), supports=small)
def candidate(x, factor):
    x, factor = x.contiguous(), factor.contiguous()
    forward, backward = torch.empty_like(x), torch.empty_like(x)
    N, D = x.shape
    if x.numel():
        ROWS, COLUMNS = triton.next_power_of_2(N), triton.next_power_of_2(D)
        scan_kernel[(1,)](x, factor, forward, backward, N, D, ROWS=ROWS, COLUMNS=COLUMNS)
    return forward, backward


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The function is not associative: it forgets to multiply the factors.
    wrong(
        "factors_not_multiplied",
        ("return factor * next_factor,", "return next_factor,"),
        fault="accumulation",
        result="forward",
    ),
    wrong(
        "columns_scanned_from_their_first_element",
        (", 0, recur, reverse=True)", ", 0, recur)"),
        fault="order",
        result="backward",
    ),
]
