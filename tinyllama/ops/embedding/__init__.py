"""Rows of a table by number, and the gradient of the table: sums over the tokens of each row."""

from functools import partial

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import constant, integers, normal, ranked
from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_rows, contiguous, dense_rows
from tinyllama.harness.kernels.streams import Side

embedding = Op(
    "embedding",
    inputs={
        "weight": Tensor("V D", grad=True),
        "tokens": Tensor("N", dtype=torch.int64, values=lambda dims: integers(dims["V"])),
    },
    outputs={"y": "N D"},
    cases=[
        Case(N=10, V=7, D=24, why="tokens that return"),
        Case(N=3, V=100, D=16, why="rows that no token takes"),
        Case(N=1, V=1, D=5, why="one row"),
        Case(N=150, V=70, D=65, why="several blocks of tokens, ragged"),
        Case(N=9, V=4, D=200, why="several blocks of columns, ragged"),
        Case(N=1100, V=34, D=17, why="rows of fewer tokens than a part, and of more"),
    ],
    timed=[
        Case(N=256, V=1000, D=128),
        Case(N=1024, V=1000, D=512),
        Case(N=8192, V=1000, D=1024),
        Case(N=4096, V=1000, D=1024, values={"tokens": ranked(1000)}, why="as frequent as words"),
    ],
    extremes={
        "one row": {"tokens": constant(0)},
        "tiny": {"weight": normal(1e-3)},
        "huge": {"weight": normal(100.0)},
    },
    bytes={
        # What has to move: how many rows are read depends on how often tokens return.
        "forward": lambda size, N, V, D: N * D * size + 8 * N,
        "backward": lambda size, N, V, D: (N * D + V * D) * size + 8 * N,
    },
    flops={"forward": lambda N, V, D: 0, "backward": lambda N, V, D: 0},
    computes=False,
    # Processes that run the same code differ by 2% in device time.
    slowdowns={"device_seconds": 0.05},
    small_kernels={
        name: "beyond 2^31 elements torch's kernels are called"
        for name in ("order_kernel", "parts_kernel", "gradient_kernel")
    },
)


@embedding.reference
def eager(weight_VD: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    """weight (V D), tokens (N) below V -> rows (N D)."""
    return weight_VD[tokens_N]


@embedding.provider("torch")
def stock(weight_VD: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens_N, weight_VD)


@embedding.independent("a product with one-hot rows")
def product(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.one_hot(tokens, len(weight)).to(weight.dtype) @ weight


# -- Triton -------------------------------------------------------------------------------------


@jit
def order_kernel(
    tokens, order, starts, n_tokens, n_rows, ROWS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Each program has ROWS rows of a table of n_rows. It writes the numbers of their tokens to
    order (N), behind those of all rows before, and where a row's begin to starts (V + 1).

    Each of TOKENS lanes reads every TOKENS-th token. A row's tokens are ordered by lane, and by
    their number in a lane: nothing is reduced over lanes inside the loops."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    before = tl.zeros((TOKENS, ROWS), tl.int32)
    counts = tl.zeros((TOKENS, ROWS), tl.int32)
    for first in range(0, n_tokens, TOKENS):
        n = first + tl.arange(0, TOKENS)
        token = tl.load(tokens + n, mask=n < n_tokens, other=n_rows).to(tl.int32)[:, None]
        before += (token < row[None, :]).to(tl.int32)
        counts += (token == row[None, :]).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts + row, start, mask=row <= n_rows)
    at = start[None, :] + tl.cumsum(counts, 0) - counts
    for first in range(0, n_tokens, TOKENS):
        n = first + tl.arange(0, TOKENS)
        token = tl.load(tokens + n, mask=n < n_tokens, other=n_rows).to(tl.int32)[:, None]
        equal = (token == row[None, :]) & (row < n_rows)[None, :]
        tl.store(order + at, tl.broadcast_to(n[:, None], (TOKENS, ROWS)), mask=equal)
        at += equal.to(tl.int32)


@jit
def rows_of(dy, order, first, stop, columns, within, dy_stride, AT_ONCE: tl.constexpr):
    """The sum of rows of dy whose numbers are order[first:stop], at most AT_ONCE of them."""
    k = first + tl.arange(0, AT_ONCE)
    n = tl.load(order + k, mask=k < stop, other=0)
    places = dy + n.to(tl.int64)[:, None] * dy_stride + columns[None, :]
    inside = (k < stop)[:, None] & within[None, :]
    return tl.sum(tl.load(places, mask=inside, other=0.0).to(tl.float32), 0)


@jit
def parts_kernel(
    dy, tokens, order, starts, parts, tokens_stride, width, dy_stride,
    PART: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each program has some columns of a row of parts (N / PART rounded up, D): a part of the sum
    of a row that PART or more tokens take; for other rows nothing is written. Part p belongs to the
    row of token order[PART p], and ends before the next part's position, or with the row. A row's
    first part includes its tokens before that position, fewer than PART."""
    position = tl.program_id(0) * PART
    row = tl.load(tokens + tl.load(order + position).to(tl.int64) * tokens_stride)
    start = tl.load(starts + row)
    stop = tl.load(starts + row + 1)
    if stop - start >= PART:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        within = columns < width
        begins = tl.where(position - start < PART, start, position)
        ends = tl.minimum(stop, position + PART)
        acc = tl.zeros((COLUMNS,), tl.float32)
        for first in range(begins, ends, AT_ONCE):
            acc += rows_of(dy, order, first, ends, columns, within, dy_stride, AT_ONCE)
        tl.store(parts + tl.program_id(0) * width + columns, acc, mask=within)


@jit
def gradient_kernel(
    dy, order, starts, parts, dweight, width, dy_stride,
    PART: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each program has some columns of a row of dweight (V D): the sum of dy over the row's tokens,
    in the order of `order_kernel`, AT_ONCE at a time; for PART or more tokens, the sum of what
    `parts_kernel` stored. PART is 0 where there are no parts."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    acc = tl.zeros((COLUMNS,), tl.float32)
    start = tl.load(starts + row)
    stop = tl.load(starts + row + 1)
    ends = stop
    if PART:
        in_parts = stop - start >= PART
        ends = tl.where(in_parts, start, stop)
        first_part = (start + PART - 1) // PART
        after = tl.where(in_parts, (stop + PART - 1) // PART, first_part)
        for first in range(first_part, after, AT_ONCE):
            part = first + tl.arange(0, AT_ONCE)
            inside = (part < after)[:, None] & within[None, :]
            places = parts + part[:, None] * width + columns[None, :]
            acc += tl.sum(tl.load(places, mask=inside, other=0.0), 0)
    for first in range(start, ends, AT_ONCE):
        acc += rows_of(dy, order, first, ends, columns, within, dy_stride, AT_ONCE)
    at = dweight + row.to(tl.int64) * width + columns
    tl.store(at, acc.to(dweight.dtype.element_ty), mask=within)


def _order(N: int) -> Config:
    rows, tokens = (2, 512) if N <= 1024 else (1, 1024)
    return Config(ROWS=rows, TOKENS=min(tokens, max(32, N)), num_warps=4)


ORDER = Space(
    "embedding.order",
    default=_order,
    configs=lambda N: [
        Config(ROWS=rows, TOKENS=min(tokens, max(32, N)), num_warps=warps)
        for rows, tokens, warps in ((1, 1024, 4), (2, 512, 4), (4, 1024, 4), (8, 512, 8))
    ],
)
GRADIENT = Space(
    "embedding.gradient",
    default=lambda D: Config(COLUMNS=min(128, max(16, D)), AT_ONCE=16, num_warps=1),
    configs=lambda D: [
        Config(COLUMNS=columns, AT_ONCE=at_once, num_warps=warps)
        for columns, at_once, warps in (
            *((128, 8, 1), (128, 16, 1), (128, 32, 1), (128, 32, 2), (128, 64, 4)),
            *((256, 8, 2), (256, 16, 2), (256, 32, 4), (512, 16, 4)),
        )
        if columns <= max(128, D)
    ],
)
# Text takes few rows very often. With more than FEW tokens, the sum of a row that PART or more take
# is made of parts, by one more launch. On an H100, the gradient of 8192 tokens with the frequencies
# of words takes 23 us in float32 (90 without parts), of uniform ones 18 (15 without).
PART, FEW = 32, 1024
MOST = 2**23  # tokens times rows; for more, torch's kernels, which sort, are faster


def by_torch(weight: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether the gradient is computed by torch's kernels: each token is compared with each row
    by ours, which also count in 32 bits."""
    (V, D), N = weight.shape, len(tokens)
    return N * V > MOST or max(N, V) * D >= 2**31


@embedding.provider(
    "triton",
    slowdowns={"device_seconds": 0.12},  # of strided inputs, in which processes differ by 6%
    requires=("triton",),
    keep=("tokens", "weight"),
    saved={"order": Tensor("N", dtype=torch.int32), "starts": Tensor("V+1", dtype=torch.int32)},
    large=(Large("N", "D", {"V": 7, "D": 64}),),
)
class Triton:
    """torch's rows forward, and beside them the tokens sorted by row; backward one launch, or two,
    without atomics: equal inputs give equal bits. With many tokens and rows torch's kernels are
    called."""

    @staticmethod
    def forward(weight: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        V, N = len(weight), len(tokens)
        order, starts = (tokens.new_empty(size, dtype=torch.int32) for size in (N, V + 1))
        if N >= V:  # torch reads rows that are not dense by single elements
            weight = dense_rows(weight)
        if by_torch(weight, tokens):
            return F.embedding(tokens, weight), order, starts
        y_ND = weight.new_empty((N, weight.shape[1]))
        dense, config = contiguous(tokens), ORDER.choose(weight.device, N=next_power_of_2(N))

        def sort() -> None:
            order_kernel[(cdiv(V + 1, config["ROWS"]),)](
                dense, order, starts, N, V, **config.kwargs()
            )

        rows = partial(torch.index_select, weight, 0, dense, out=y_ND)
        # The sort first: launched after the rows, it takes 43 us instead of 16 for 8192 tokens on
        # an H100, as if all its programs land on the few multiprocessors that are free.
        Side(weight.device).both(sort, rows)
        return y_ND, order, starts

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs) -> Named:
        weight, tokens = inputs["weight"], inputs["tokens"]
        (V, D), dy_ND = weight.shape, dense_rows(as_rows(grads[0]))
        if by_torch(weight, tokens):
            gradient = torch.ops.aten.embedding_dense_backward(dy_ND, tokens, V, -1, False)
            return {"weight": gradient}
        dweight = weight.new_empty((V, D))
        if dweight.numel():
            config = GRADIENT.choose(weight.device, D=next_power_of_2(D))
            several = len(tokens) > FEW
            parts = dy_ND.new_empty((cdiv(len(tokens), PART) * several, D), dtype=torch.float32)
            columns = cdiv(D, config["COLUMNS"])
            if several:
                parts_kernel[(len(parts), columns)](
                    dy_ND, tokens, saved["order"], saved["starts"], parts, tokens.stride(0), D,
                    dy_ND.stride(0), PART=PART, **config.kwargs(),
                )  # fmt: skip
            gradient_kernel[(V, columns)](
                dy_ND, saved["order"], saved["starts"], parts, dweight, D, dy_ND.stride(0),
                PART=PART * several, **config.kwargs(),
            )  # fmt: skip
        return {"weight": dweight}
