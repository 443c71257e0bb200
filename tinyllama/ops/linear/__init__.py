"""A projection, y = x W^T, and the products of its backward pass: dx = dy W, dW = dy^T x.

The products are the vendor's BLAS. In tf32 the matrix units of some chips read operands only
along the inner axis of a product; kernels for other operands take up to 1.7 times as long.
There an operand is transposed first, where a search on the chip found that it pays.
"""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import next_power_of_2
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_rows, contiguous
from tinyllama.harness.kernels.precision import compute_dtype, input_precision, product
from tinyllama.ops.transpose import transposed

linear = Op(
    "linear",
    inputs={"x": Tensor("N D", grad=True), "w": Tensor("F D", grad=True, values=normal(0.1))},
    outputs={"y": "N F"},
    leading=("N",),
    instead="a bias is added to y",
    cases=[
        Case(N=10, D=32, F=48),
        Case(N=1, D=24, F=40, why="one row"),
        Case(N=63, D=20, F=7, why="ragged, narrower than it is wide"),
        Case(N=(2, 3, 5), D=24, F=16, why="more leading axes"),
        Case(N=(), D=24, F=64, why="a vector"),
    ],
    timed=[
        Case(N=256, D=128, F=256),
        Case(N=1024, D=512, F=4096),
        Case(N=8192, D=1024, F=1024),
        Case(N=8192, D=1024, F=2048),
    ],
    extremes={"tiny": {"x": normal(1e-3)}, "huge": {"x": normal(100.0)}},
    bytes={
        "forward": lambda size, N, D, F: (N * D + F * D + N * F) * size,
        "backward": lambda size, N, D, F: (2 * N * D + 2 * F * D + N * F) * size,
    },
    flops={"forward": lambda N, D, F: 2 * N * D * F, "backward": lambda N, D, F: 4 * N * D * F},
)


@linear.reference
def eager(x_ND: torch.Tensor, w_FD: torch.Tensor) -> torch.Tensor:
    """x (... D) and w (F D) -> y (... F)."""
    return x_ND @ w_FD.T


@linear.provider("torch")
def stock(x_ND: torch.Tensor, w_FD: torch.Tensor) -> torch.Tensor:
    """The same product."""
    return F.linear(x_ND, w_FD)


@linear.independent("torch.einsum")
def contraction(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...d,fd->...f", x, w)


# Whether to transpose an operand depends on the longer side of a weight's gradient, and on the rows
# and the inner axis of an input's gradient. Sizes beyond these share one choice.
LONGEST_SIDE, MOST_ROWS = 4096, 8192


def _turning(name: str) -> Space:
    return Space(
        name,
        default=lambda **key: Config(TURN=0),
        configs=lambda **key: [Config(TURN=turn) for turn in (0, 1)],
    )


WEIGHT_GRADIENT = _turning("linear.weight_gradient")
INPUT_GRADIENT = _turning("linear.input_gradient")


def _turns(space: Space, x: torch.Tensor, **key: int) -> bool:
    return input_precision(x) == "tf32" and bool(space.choose(x.device, **key)["TURN"])


def weight_gradient(
    dy_NF: torch.Tensor, x_ND: torch.Tensor, dtype: torch.dtype, into: torch.Tensor | None = None
) -> torch.Tensor:
    """dW (F D) = dy^T x in ``dtype``, accumulated in float32; dy (N F) and x (N D) have one dtype
    and dense rows. Of the two the narrower one is transposed, if any. into: the memory for dW."""
    longer = min(LONGEST_SIDE, next_power_of_2(max(dy_NF.shape[1], x_ND.shape[1])))
    if _turns(WEIGHT_GRADIENT, x_ND, longer=longer):
        if x_ND.shape[1] <= dy_NF.shape[1]:
            return product(dy_NF.T, transposed(x_ND).T, dtype, into)
        return product(transposed(dy_NF), x_ND, dtype, into)
    return product(dy_NF.T, x_ND, dtype, into)


def input_gradient(dy_NF: torch.Tensor, w_FD: torch.Tensor) -> torch.Tensor:
    """dx (N D) = dy W in dy's dtype; dy (N F) and w (F D) have one dtype and dense rows."""
    rows, inner = map(next_power_of_2, dy_NF.shape)
    if _turns(INPUT_GRADIENT, dy_NF, rows=min(MOST_ROWS, rows), inner=inner):
        return torch.mm(dy_NF, transposed(w_FD).T)
    return torch.mm(dy_NF, w_FD)


@linear.provider(
    "triton",
    keep=("x", "w"),
    requires=("triton",),
    replays=True,
    borrows="operands are transposed by the kernel of `transpose`, where a chip's table says so",
)
class Products:
    """One product forward and two backward, with operands as the BLAS is fastest with them."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(x)
        if x.dim() == 1:  # torch's product of a vector changes its result's shape in place
            return F.linear(x[None].to(dtype), w.to(dtype)).view(-1)
        return F.linear(x.to(dtype), w.to(dtype))

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs) -> Named:
        x, w = inputs["x"], inputs["w"]
        dy_NF = as_rows(contiguous(grads[0]))
        gradients = {}
        if "x" in needs:
            dx_ND = input_gradient(dy_NF, contiguous(w).to(dy_NF.dtype)).to(x.dtype)
            gradients["x"] = dx_ND.view(x.shape)
        if "w" in needs:
            x_ND = as_rows(contiguous(x)).to(dy_NF.dtype)
            gradients["w"] = weight_gradient(dy_NF, x_ND, w.dtype)
        return gradients
