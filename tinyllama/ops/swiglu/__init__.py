"""SwiGLU: h = silu(x Wg^T) * (x Wu^T), silu(a) = a sigmoid(a)  (Shazeer, arXiv 2002.05202)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_one, contiguous
from tinyllama.harness.kernels.precision import compute_dtype
from tinyllama.ops.linear import input_gradient, weight_gradient
from tinyllama.ops.silu_mul import activate, activate_backward, by_glu, sigmoids

swiglu = Op(
    "swiglu",
    inputs={
        "x": Tensor("B T D", grad=True),
        "w_gate": Tensor("F D", grad=True, values=normal(0.2)),
        "w_up": Tensor("F D", grad=True, values=normal(0.2)),
    },
    outputs={"h": "B T F"},
    cases=[
        Case(B=2, T=3, D=32, F=24),  # small: the naive kernel is interpreted element by element
        Case(B=1, T=1, D=16, F=33, why="one row, ragged width"),
        Case(B=1, T=130, D=20, F=4, why="many rows: the weight gradients' reduction"),
    ],
    timed=[
        Case(B=4, T=64, D=128, F=256),
        Case(B=8, T=128, D=512, F=2048),
        Case(B=4, T=4096, D=2048, F=8192),
    ],
    extremes={"saturated": {"x": normal(50.0)}, "tiny": {"x": normal(1e-3)}},
    bytes={
        "forward": lambda size, B, T, D, F: (B * T * (D + F) + 2 * F * D) * size,
        "backward": lambda size, B, T, D, F: (B * T * (2 * D + 3 * F) + 4 * F * D) * size,
    },
    flops={
        "forward": lambda B, T, D, F: 4 * B * T * D * F + 5 * B * T * F,
        "backward": lambda B, T, D, F: 8 * B * T * D * F + 10 * B * T * F,
    },
)


@swiglu.reference
def eager(x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> torch.Tensor:
    """x (B T D), weights (F D) -> h (B T F): two products, silu, multiply."""
    return F.silu(F.linear(x_BTD, w_gate_FD)) * F.linear(x_BTD, w_up_FD)


# Processes that run the same code differ by 6%.
@swiglu.provider("torch")
def stacked(x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> torch.Tensor:
    """One product with the stacked weights: one pass over x, at the price of a copy of W."""
    gate, up = F.linear(x_BTD, torch.cat((w_gate_FD, w_up_FD))).chunk(2, -1)
    return F.silu(gate) * up


@swiglu.independent("torch.nn.functional.glu")
def gated(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    return by_glu(x @ w_gate.mT, x @ w_up.mT)


# -- Triton -------------------------------------------------------------------------------------


def stacked_weights(w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> list[torch.Tensor]:
    """Both as one (2F D) view where they lie side by side in memory, else the two."""
    stacked = as_one(w_gate_FD, w_up_FD)
    return (
        [w_gate_FD, w_up_FD]
        if stacked is None
        else [stacked.view(2 * w_gate_FD.shape[0], w_gate_FD.shape[1])]
    )


class Hybrid:
    """Products by the vendor's BLAS, one for both weights where these lie side by side; the
    activation and its gradient in one kernel each, from gate and up, which are all that is saved.

    Under autocast the products have its dtype.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, F = compute_dtype(x), w_gate.shape[0]
        x_ND = x.flatten(0, 1).to(dtype)
        gate_up = x_ND.new_empty((x_ND.shape[0], 2 * F))
        weights = stacked_weights(w_gate, w_up)
        for weight, out in zip(weights, gate_up.chunk(len(weights), -1), strict=True):
            torch.mm(x_ND, weight.to(dtype).T, out=out)
        h_NF = activate(*gate_up.chunk(2, -1))
        return h_NF.view(*x.shape[:-1], F), gate_up

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs) -> Named:
        x, gate_up = inputs["x"], saved["gate_up"]
        names, dtype = ("w_gate", "w_up"), gate_up.dtype
        dgate_up = torch.empty_like(gate_up)
        dh_NF = contiguous(grads[0]).flatten(0, 1)
        activate_backward(dh_NF, *gate_up.chunk(2, -1), *dgate_up.chunk(2, -1))
        gradients = {}
        if "x" in needs:
            weights = stacked_weights(*(inputs[name] for name in names))
            parts = dgate_up.chunk(len(weights), -1)
            dx_ND = input_gradient(parts[0], weights[0].to(dtype))
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                dx_ND.addmm_(part, weight.to(dtype))
            gradients["x"] = dx_ND.to(x.dtype).view(x.shape)
        if not needs.isdisjoint(names):
            x_ND = x.flatten(0, 1).to(dtype)
            dboth = weight_gradient(dgate_up, x_ND, inputs["w_gate"].dtype)
            gradients.update(zip(names, dboth.chunk(2), strict=True))
        return gradients


swiglu.provider(
    "triton",
    keep=("x", "w_gate", "w_up"),
    reads={"x": contiguous},
    saved={"gate_up": Tensor("B*T 2*F")},
    requires=("triton",),
    replays=True,
    large=(Large("B", "T*F", {"T": 3, "D": 16, "F": 1000}),),
)(Hybrid)


@jit
def element_kernel(x, w_gate, w_up, h, gate, up, D, F, stride_out, BLOCK: tl.constexpr):
    """One element h[n, f], and the gate[n, f] and up[n, f] that it is made of: two dot products
    over D. The other elements of row n read the same x again, those of column f the same weights.
    """
    n, f = (tl.program_id(0) // F).to(tl.int64), (tl.program_id(0) % F).to(tl.int64)
    a, b = tl.full((BLOCK,), 0.0, tl.float32), tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        values = tl.load(x + n * D + d, mask=d < D, other=0.0).to(tl.float32)
        a += values * tl.load(w_gate + f * D + d, mask=d < D, other=0.0).to(tl.float32)
        b += values * tl.load(w_up + f * D + d, mask=d < D, other=0.0).to(tl.float32)
    gate_value, up_value = tl.sum(a, axis=0), tl.sum(b, axis=0)
    sigmoid, _ = sigmoids(gate_value)
    value = gate_value * sigmoid * up_value
    tl.store(h + n * F + f, value.to(h.dtype.element_ty))
    tl.store(gate + n * stride_out + f, gate_value.to(gate.dtype.element_ty))
    tl.store(up + n * stride_out + f, up_value.to(up.dtype.element_ty))


ELEMENT = Space(
    "swiglu.element",
    default=lambda D: Config(BLOCK=min(D, 256), num_warps=1),
    configs=lambda D: [Config(BLOCK=min(D, 256), num_warps=1)],
)
MOST_NAIVE_WORK = 2**33  # multiplications; some milliseconds on a large GPU


def _too_slow(dims: Mapping[str, Any]) -> str | None:
    work = dims["B"] * dims["T"] * dims["D"] * dims["F"]
    if work <= MOST_NAIVE_WORK:
        return None
    return f"one program for each element: B T D F = {work:,} is more than {MOST_NAIVE_WORK:,}"


@swiglu.provider(
    "naive",
    keep=("x", "w_gate", "w_up"),
    reads=dict.fromkeys(("x", "w_gate", "w_up"), contiguous),
    saved={"gate_up": Tensor("B*T 2*F")},
    requires=("triton",),
    supports=_too_slow,
    large=(Large("B", "2*T*F", {"T": 1, "D": 2, "F": 64}),),
    # A program for each element: interpreted, few of them.
    random_dims=lambda draw: {"B": draw(1, 2), "T": draw(1, 2), "D": draw(1, 70), "F": draw(1, 9)},
)
class Naive:
    """The kernel one writes first, a program for each element of h: right, and slow, since
    nothing that is read is used twice. Kept as something to find. Backward as in `Hybrid`."""

    @staticmethod
    def forward(
        x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, (F, D) = compute_dtype(x), w_gate.shape
        x_ND, gate_FD, up_FD = (t.to(dtype) for t in (x, w_gate, w_up))
        N = x.shape[0] * x.shape[1]
        h = x_ND.new_empty((*x.shape[:-1], F))
        gate_up = x_ND.new_empty((N, 2 * F))
        if N:
            config = ELEMENT.choose(x.device, D=next_power_of_2(D))
            element_kernel[(N * F,)](
                x_ND, gate_FD, up_FD, h, *gate_up.chunk(2, -1), D, F, 2 * F, **config.kwargs()
            )
        return h, gate_up

    backward = Hybrid.backward
