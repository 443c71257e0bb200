"""Rows of a table by number, and the gradient of the table: sums over the tokens of each row."""

from functools import partial

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import constant, integers, normal
from tinyllama.harness.kernels import begin, cdiv, dependent, jit, next_power_of_2, tl
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
    ],
    timed=[Case(N=256, V=1000, D=128), Case(N=1024, V=1000, D=512), Case(N=8192, V=1000, D=1024)],
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
    # Processes that run the same code differ by 2% in device time, and by 6% in host time.
    slowdowns={"device_seconds": 0.05, "host_seconds": 0.15},
    small_kernels={
        name: "beyond 2^31 elements torch's kernels are called"
        for name in ("order_kernel", "gradient_kernel")
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
    """One program ROWS rows of a table of n_rows: the numbers of the tokens that take each, in
    their order, into order (N) from where starts (V + 1) says. A row's tokens come behind those of
    all rows before it, which are counted first."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.zeros((ROWS,), tl.int32)
    for first in range(0, n_tokens, TOKENS):
        n = first + tl.arange(0, TOKENS)
        token = tl.load(tokens + n, mask=n < n_tokens, other=n_rows)
        at += tl.sum((token[:, None] < row[None, :]).to(tl.int32), 0)
    tl.store(starts + row, at, mask=row <= n_rows)
    for first in range(0, n_tokens, TOKENS):
        n = first + tl.arange(0, TOKENS)
        token = tl.load(tokens + n, mask=n < n_tokens, other=n_rows)
        found = ((token[:, None] == row[None, :]) & (row < n_rows)[None, :]).to(tl.int32)
        rank = tl.cumsum(found, 0)  # 1 for the first of the row's
        number = tl.broadcast_to(n[:, None], (TOKENS, ROWS))
        tl.store(order + (at[None, :] + rank - 1), number, mask=found > 0)
        at += tl.sum(found, 0)


@jit
def gradient_kernel(
    dy, order, starts, dweight, width, dy_stride,
    COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program some columns of a row of dweight (V D): the sum of dy over the row's tokens,
    in their order, ``AT_ONCE`` at a time. order and starts are `order_kernel`'s."""
    begin(PDL)
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    acc = tl.zeros((COLUMNS,), tl.float32)
    stop = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), stop, AT_ONCE):
        k = first + tl.arange(0, AT_ONCE)
        n = tl.load(order + k, mask=k < stop, other=0)
        places = dy + n.to(tl.int64)[:, None] * dy_stride + columns[None, :]
        inside = (k < stop)[:, None] & within[None, :]
        acc += tl.sum(tl.load(places, mask=inside, other=0.0).to(tl.float32), 0)
    at = dweight + row.to(tl.int64) * width + columns
    tl.store(at, acc.to(dweight.dtype.element_ty), mask=within)


ORDER = Space(
    "embedding.order",
    default=lambda N: Config(ROWS=4, TOKENS=min(1024, max(32, N)), num_warps=4),
    configs=lambda N: [
        Config(ROWS=rows, TOKENS=min(tokens, max(32, N)), num_warps=warps)
        for rows, tokens, warps in ((1, 1024, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 4))
    ],
)
GRADIENT = Space(
    "embedding.gradient",
    default=lambda D: Config(COLUMNS=min(128, max(16, D)), AT_ONCE=32, num_warps=1),
    configs=lambda D: [
        Config(COLUMNS=columns, AT_ONCE=at_once, num_warps=warps)
        for columns, at_once, warps in (
            *((128, 8, 1), (128, 16, 1), (128, 32, 1), (128, 32, 2), (128, 64, 4)),
            *((256, 8, 2), (256, 16, 2), (256, 32, 4), (512, 16, 4)),
        )
        if columns <= max(128, D)
    ],
)
MOST = 2**23  # tokens times rows; for more, torch's kernels, which sort, are faster


def by_torch(weight: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether the gradient is computed by torch's kernels: each token is compared with each row
    by ours, which also count in 32 bits."""
    (V, D), N = weight.shape, len(tokens)
    return N * V > MOST or max(N, V) * D >= 2**31


@embedding.provider(
    "triton",
    requires=("triton",),
    keep=("tokens", "weight"),
    saved={"order": Tensor("N", dtype=torch.int32), "starts": Tensor("V+1", dtype=torch.int32)},
    large=(Large("N", "D", {"V": 7, "D": 64}),),
)
class Triton:
    """torch's rows forward, and beside them the tokens sorted by row; backward one launch without
    atomics: equal inputs give equal bits. With many tokens and rows torch's kernels are called."""

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
        Side(weight.device).both(rows, sort)
        return y_ND, order, starts

    @staticmethod
    def backward(grads: Grads, kept: Named, saved: Named, needs: Needs) -> Named:
        weight, tokens = kept["weight"], kept["tokens"]
        (V, D), dy_ND = weight.shape, dense_rows(as_rows(grads[0]))
        if by_torch(weight, tokens):
            found = torch.ops.aten.embedding_dense_backward(dy_ND, tokens, V, -1, False)
            return {"weight": found}
        dweight = weight.new_empty((V, D))
        if dweight.numel():
            config = GRADIENT.choose(weight.device, D=next_power_of_2(D))
            gradient_kernel[(V, cdiv(D, config["COLUMNS"]))](
                dy_ND, saved["order"], saved["starts"], dweight, D, dy_ND.stride(0),
                **config.kwargs(), **dependent(weight.device),
            )  # fmt: skip
        return {"weight": dweight}
