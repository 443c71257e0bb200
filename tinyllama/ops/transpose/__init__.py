"""The transpose of a matrix, written out: y = x^T with dense rows.

Matrix units that read float32 operands only along the products' inner axis (tf32 on some chips)
run other operands through slower kernels; see `linear`.
"""

import torch

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import cdiv, jit, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import dense_rows
from tinyllama.harness.kernels.precision import SHORT

transpose = Op(
    "transpose",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "D N"},
    cases=[
        Case(N=6, D=24),
        Case(N=1, D=1, why="one element"),
        Case(N=65, D=33, why="tiles that end beside a row and a column"),
        Case(N=3, D=257, why="rows longer than any tile, few of them"),
    ],
    timed=[Case(N=256, D=128), Case(N=1024, D=512), Case(N=16384, D=4096)],
    extremes={"huge": {"x": normal(1e4)}},
    bytes={
        "forward": lambda size, N, D: 2 * N * D * size,
        "backward": lambda size, N, D: 0,  # it may be a view of the upstream gradient
    },
    flops={"forward": lambda N, D: 0, "backward": lambda N, D: 0},
    computes=False,
    # Times of torch's strided copies depend on the pages that they get.
    slowdowns={"device_seconds": 0.04},
)


@transpose.reference
def eager(x_ND: torch.Tensor) -> torch.Tensor:
    """x (N D) -> y (D N), dense and apart from x."""
    return x_ND.T.clone(memory_format=torch.contiguous_format)


@transpose.provider("torch")
def stock(x_ND: torch.Tensor) -> torch.Tensor:
    """One stock kernel: a strided copy."""
    return torch.transpose_copy(x_ND, 0, 1)


@transpose.independent("torch.einsum")
def contraction(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nd,nm->dm", x, torch.eye(x.shape[0], dtype=x.dtype, device=x.device))


# -- Triton -------------------------------------------------------------------------------------


@jit
def transpose_kernel(x, y, n_rows, n_columns, stride, TILE: tl.constexpr):
    """y (n_columns n_rows) = x^T on a tile; rows of x are ``stride`` apart."""
    across = tl.cdiv(n_columns, TILE)
    rows = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    columns = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tile = tl.trans(tl.load(x + at, mask=inside, other=0.0))
    inside = (columns < n_columns)[:, None] & (rows < n_rows)[None, :]
    tl.store(y + columns.to(tl.int64)[:, None] * n_rows + rows[None, :], tile, mask=inside)


TRANSPOSE = Space(
    "transpose",
    default=lambda dtype: Config(TILE=32 if dtype == "fp32" else 64, num_warps=4),
    configs=lambda dtype: [Config(TILE=tile, num_warps=w) for tile in (32, 64) for w in (2, 4, 8)],
)


def transposed(x_ND: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """x (N D), rows any distance apart -> x^T (D N), contiguous. One launch. into: its memory."""
    x_ND = dense_rows(x_ND)
    N, D = x_ND.shape
    y_DN = x_ND.new_empty((D, N)) if into is None else into
    if y_DN.numel():
        config = TRANSPOSE.choose(x_ND.device, dtype=SHORT[x_ND.dtype])
        tile = config["TILE"]
        transpose_kernel[(cdiv(N, tile) * cdiv(D, tile),)](
            x_ND, y_DN, N, D, x_ND.stride(0), **config.kwargs()
        )
    return y_DN


@transpose.provider(
    "triton",
    requires=("triton",),
    replays=True,
    slowdowns={"device_seconds": 0.02},
    large=(Large("N", "D", {"D": 1000}),),
)
class Triton:
    """One launch each way, over tiles that pass through shared memory."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return transposed(x)

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs) -> Named:
        return {"x": transposed(grads[0])}
