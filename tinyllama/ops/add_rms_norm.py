"""Residual addition and RMSNorm in one op: both the sum and its norm are results.

sum = x + residual, y = rms_norm(sum). Either upstream gradient may be absent: the last
sum of a model feeds only a norm.
"""

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Named, Needs, SomeGrads
from tinyllama.harness.declare.values import normal, scaled_rows
from tinyllama.harness.kernels.layout import as_rows, contiguous
from tinyllama.harness.kernels.precision import compute_dtype
from tinyllama.ops import rms_norm as rms_norm_file
from tinyllama.ops.rms_norm.kernels import (
    launch_backward,
    launch_forward,
    new_partials,
    sum_rows,
    too_wide,
)

Pair = tuple[torch.Tensor, torch.Tensor]

add_rms_norm = Op(
    "add_rms_norm",
    inputs={
        "x": Tensor("B T D", grad=True),
        "residual": Tensor("B T D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.5, mean=1.0)),
    },
    params={"eps": 1e-5},
    outputs={"y": "B T D", "sum": "B T D"},
    leading=("B", "T"),
    instead=rms_norm_file.rms_norm.instead,
    cases=[
        Case(B=2, T=5, D=64),
        Case(B=1, T=1, D=128, why="one row"),
        Case(B=1, T=3, D=100, why="width that no power of two divides"),
        Case(B=1, T=300, D=16, why="many rows: the weight gradient's reduction"),
        Case(B=1, T=41, D=512, why="prefetched tiles, more of them than programs"),
        Case(B=2, T=3, D=64, params={"eps": 0.5}, why="epsilon that dominates"),
        Case(B=(2, 3), T=4, D=40, why="more leading axes"),
        Case(B=(), T=6, D=48, why="a matrix"),
        Case(B=(), T=(), D=72, why="a vector"),
    ],
    timed=[Case(B=4, T=64, D=128), Case(B=8, T=128, D=512), Case(B=8, T=4096, D=4096)],
    extremes={
        "tiny": {"x": normal(1e-3), "residual": normal(1e-3)},
        "huge": {"x": normal(300.0), "residual": normal(300.0)},
        "rows": {"x": scaled_rows(1e-3, 1e2), "residual": scaled_rows(1e-3, 1e2)},
    },
    bytes={
        "forward": lambda size, B, T, D: (4 * B * T * D + D) * size,
        "backward": lambda size, B, T, D: (4 * B * T * D + 2 * D) * size,
    },
    flops={"forward": lambda B, T, D: 5 * B * T * D, "backward": lambda B, T, D: 9 * B * T * D},
)


@add_rms_norm.reference
def eager(
    x_BTD: torch.Tensor, residual_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5
) -> Pair:
    """x, residual (... D), weight (D) -> y, sum (... D)."""
    total_BTD = x_BTD + residual_BTD
    return rms_norm_file.eager(total_BTD, weight_D, eps), total_BTD


# Processes that run the same code differ by 1.5%.
@add_rms_norm.provider("torch", slowdowns={"device_seconds": 0.04})
def fused(
    x_BTD: torch.Tensor, residual_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float = 1e-5
) -> Pair:
    total_BTD = x_BTD + residual_BTD
    return rms_norm_file.fused(total_BTD, weight_D, eps), total_BTD


@add_rms_norm.independent("torch.add and torch.nn.functional.rms_norm")
def stock(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    total = torch.add(x, residual)
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total


@add_rms_norm.magnitude(rounded_to=torch.float32)
def terms(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    upstream: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The terms of the norm's dx, see `tinyllama.ops.rms_norm.terms`, and the sum's gradient."""
    norm = rms_norm_file.terms(x + residual, weight, eps, {"y": upstream["y"]})["grad x"]
    magnitude = (norm.square() + upstream["sum"].square()).sqrt()
    return {"grad x": magnitude, "grad residual": magnitude}


def _norm_dtype(x: torch.Tensor, residual: torch.Tensor) -> torch.dtype:
    """Of the norm of x + residual, which has the wider of their dtypes."""
    if x.dtype is residual.dtype:
        return compute_dtype(x)
    return compute_dtype(x.new_empty(0, dtype=torch.promote_types(x.dtype, residual.dtype)))


def add_norm_forward(
    x_ND: torch.Tensor,
    residual_ND: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual (N D), weight (D), of any float dtypes -> y (N D) in ``out_dtype``,
    sum = x + residual (N D) in the wider of their dtypes, rstd (N) float32.

    y is the norm of the sum as it is rounded. One launch; the backward pass is `norm_backward`,
    with the sum for x and the gradient of the sum for ``dresidual_ND``.
    """
    y_ND, sum_ND, rstd_N = launch_forward(x_ND, residual_ND, weight_D, eps, out_dtype)
    assert sum_ND is not None
    return y_ND, sum_ND, rstd_N


@add_rms_norm.provider(
    "triton",
    keep=("sum", "weight"),
    reads=dict.fromkeys(("x", "residual", "weight"), contiguous),
    saved={
        "rstd": Tensor("B*T", dtype=torch.float32),
        "like_x": Tensor("0"),
        "like_residual": Tensor("0"),
    },
    requires=("triton",),
    replays=True,
    large=(Large("B", "T*D", {"T": 3, "D": 1000}),),
    supports=too_wide,
)
class Triton:
    """One launch forward, two backward, where x and residual get one gradient, or the same one
    in two dtypes. Under autocast y has autocast's dtype; the sum has the wider one of x and
    residual."""

    @staticmethod
    def forward(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        x_ND, residual_ND = as_rows(x), as_rows(residual)
        y_ND, sum_ND, rstd_N = add_norm_forward(
            x_ND, residual_ND, weight, eps, _norm_dtype(x, residual)
        )
        return (
            y_ND.view(x.shape),
            sum_ND.view(x.shape),
            rstd_N,
            x.new_empty(0),
            residual.new_empty(0),
        )

    @staticmethod
    def backward(grads: SomeGrads, inputs: Named, saved: Named, needs: Needs, eps: float) -> Named:
        dy, dsum = grads
        total, weight = inputs["sum"], inputs["weight"]
        dtypes = {name: saved[f"like_{name}"].dtype for name in ("residual", "x")}
        dtypes = {name: dtype for name, dtype in dtypes.items() if name in needs}
        if dy is None:
            assert dsum is not None  # without any gradient autograd does not call this
            gradients = {name: dsum.to(dtype) for name, dtype in dtypes.items()}
            return {**gradients, "weight": torch.zeros_like(weight)}
        dy_ND, sum_ND = as_rows(contiguous(dy)), as_rows(total)
        dsum_ND = None if dsum is None else as_rows(contiguous(dsum))
        result_dtypes = dict.fromkeys(dtypes.values())
        by_dtype = {dtype: torch.empty_like(total, dtype=dtype) for dtype in result_dtypes}
        dx_ND, low_ND = [*map(as_rows, by_dtype.values()), None, None][:2]
        partials = new_partials(sum_ND) if "weight" in needs else None
        launch_backward(dy_ND, sum_ND, weight, saved["rstd"], dsum_ND, dx_ND, low_ND, partials)
        # One tensor for both inputs, as torch's own addition returns it: autograd counts who holds
        # a gradient before it adds to one in place.
        gradients = {name: by_dtype[dtype] for name, dtype in dtypes.items()}
        if partials is not None:
            gradients["weight"] = sum_rows(partials, weight.dtype)
        return gradients
