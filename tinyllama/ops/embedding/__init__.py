"""Rows of a table by number, and the gradient of the table: sums over the tokens of each row."""

from __future__ import annotations

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
        Case(N=70, V=70, D=65, why="several blocks of each, ragged"),
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
    dy, tokens, dweight, n_tokens, n_rows, width, dy_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """dweight (V D): a product with the matrix that says which token takes which row. It is exact:
    ones, and dy in three parts of 8 bits that bfloat16 holds without rounding."""
    begin(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, n_tokens, TOKENS):
        n = first + tl.arange(0, TOKENS)
        there = n < n_tokens
        takes = tl.load(tokens + n, mask=there, other=-1)[None, :] == rows[:, None]
        inside = there[:, None] & (columns < width)[None, :]
        at = dy + n.to(tl.int64)[:, None] * dy_stride + columns[None, :]
        left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        takes = takes.to(tl.bfloat16)
        for _ in tl.static_range(3):
            part = left.to(tl.bfloat16)
            acc = tl.dot(takes, part, acc)
            left -= part.to(tl.float32)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    at = dweight + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(at, acc.to(dweight.dtype.element_ty), mask=inside)


GRADIENT = Space(
    "embedding.gradient",
    default=lambda V, D: Config(ROWS=64, COLUMNS=32, TOKENS=128, num_warps=4, num_stages=2),
    configs=lambda V, D: [
        Config(ROWS=rows, COLUMNS=columns, TOKENS=tokens, num_warps=4, num_stages=stages)
        for rows in (64, 128)
        for columns in (16, 32, 64)
        for tokens in (64, 128, 256)
        for stages in (2, 3)
    ],
)
MOST = 2**21  # entries of the matrix of tokens and rows; torch's kernels, which sort, take more


@embedding.provider(
    "triton",
    requires=("triton",),
    keep=("tokens", "weight"),
    large=(Large("V", "D", {"N": 4, "D": 64}, settings={"MOST": 2**62}),),
)
class Triton:
    """torch's rows forward; backward one launch without a sort, for tables of few rows."""

    @staticmethod
    def forward(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(grads: Grads, kept: Named, saved: Named, needs: Needs) -> Named:
        weight, tokens = kept["weight"], contiguous(kept["tokens"])
        (V, D), dy_ND = weight.shape, dense_rows(as_rows(grads[0]))
        if len(tokens) * V > MOST:
            counted = torch.ops.aten.embedding_dense_backward(dy_ND, tokens, V, -1, False)
            return {"weight": counted}
        dweight = weight.new_empty((V, D))
        if dweight.numel():
            config = GRADIENT.choose(weight.device, V=next_power_of_2(V), D=next_power_of_2(D))
            gradient_kernel[(cdiv(V, config["ROWS"]), cdiv(D, config["COLUMNS"]))](
                dy_ND, tokens, dweight, len(tokens), V, D, dy_ND.stride(0),
                **config.kwargs(), **dependent(weight.device),
            )  # fmt: skip
        return {"weight": dweight}
