"""Rows of a table by number, and the gradient of the table: sums over the tokens of each row."""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import constant, integers, normal
from tinyllama.harness.kernels import begin, cdiv, dependent, jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_rows, contiguous, dense_rows

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
        "forward": lambda size, N, V, D: 2 * N * D * size + 8 * N,
        "backward": lambda size, N, V, D: (N * D + V * D) * size + 8 * N,
    },
    flops={"forward": lambda N, V, D: 0, "backward": lambda N, V, D: 0},
    computes=False,
    small_kernels={"gradient_kernel": "beyond 2^31 elements torch's kernels are called"},
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
def gradient_kernel(
    dy, tokens, dweight, n_tokens, width, dy_stride,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program some columns of a row of dweight (V D): the sum of dy over the row's tokens,
    in their order. In each block of tokens the row's are counted, and dy is read for them
    alone, ``AT_ONCE`` at a time."""
    begin(PDL)
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    acc = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, n_tokens, TOKENS):
        n = first + tl.arange(0, TOKENS)
        found = (tl.load(tokens + n, mask=n < n_tokens, other=-1) == row).to(tl.int32)
        count = tl.sum(found, 0)
        if count > 0:
            rank = tl.cumsum(found, 0) * found  # 1 for the first of the row's, 0 for all others
            for start in range(0, count, AT_ONCE):
                wanted = start + 1 + tl.arange(0, AT_ONCE)
                at = tl.sum(tl.where(rank[:, None] == wanted[None, :], n[:, None], 0), 0)
                places = dy + at.to(tl.int64)[:, None] * dy_stride + columns[None, :]
                inside = (wanted <= count)[:, None] & within[None, :]
                acc += tl.sum(tl.load(places, mask=inside, other=0.0).to(tl.float32), 0)
    at = dweight + row.to(tl.int64) * width + columns
    tl.store(at, acc.to(dweight.dtype.element_ty), mask=within)


GRADIENT = Space(
    "embedding.gradient",
    default=lambda D: Config(COLUMNS=min(128, max(16, D)), TOKENS=128, AT_ONCE=16, num_warps=1),
    configs=lambda D: [
        Config(COLUMNS=columns, TOKENS=tokens, AT_ONCE=at_once, num_warps=columns // 128)
        for columns in (128, 256)
        for tokens, at_once in ((128, 8), (128, 16), (256, 4), (256, 8), (512, 4))
        if columns <= max(128, D)
    ],
)
MOST = 2**23  # tokens times rows; for more, torch's kernels, which sort, are faster


@embedding.provider(
    "triton",
    requires=("triton",),
    keep=("tokens", "weight"),
    large=(Large("N", "D", {"V": 7, "D": 64}),),
)
class Triton:
    """torch's rows forward; backward one launch without a sort or atomics, where tokens times rows
    are few: equal inputs give equal bits."""

    @staticmethod
    def forward(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(grads: Grads, kept: Named, saved: Named, needs: Needs) -> Named:
        weight, tokens = kept["weight"], contiguous(kept["tokens"])
        (V, D), dy_ND = weight.shape, dense_rows(as_rows(grads[0]))
        if len(tokens) * V > MOST or max(len(tokens), V) * D >= 2**31:
            counted = torch.ops.aten.embedding_dense_backward(dy_ND, tokens, V, -1, False)
            return {"weight": counted}
        dweight = weight.new_empty((V, D))
        if dweight.numel():
            config = GRADIENT.choose(weight.device, D=next_power_of_2(D))
            gradient_kernel[(V, cdiv(D, config["COLUMNS"]))](
                dy_ND, tokens, dweight, len(tokens), D, dy_ND.stride(0),
                **config.kwargs(), **dependent(weight.device),
            )  # fmt: skip
        return {"weight": dweight}
