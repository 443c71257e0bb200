"""GLU, the product of an input and a gate's sigmoid: backward reads its upstream gradient as if it
were dense."""

from typing import Any

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import cdiv, jit, tl

BLOCK = 64

gated_sigmoid = Op(
    "gated_sigmoid",
    inputs={"x": Tensor("N F", grad=True), "gate": Tensor("N F", grad=True)},
    outputs={"y": "N F"},
    cases=[Case(N=4, F=40), Case(N=1, F=16, why="one row")],
    dtypes=(torch.float32,),
)


@gated_sigmoid.reference
def eager(x_NF: torch.Tensor, gate_NF: torch.Tensor) -> torch.Tensor:
    return x_NF * torch.sigmoid(gate_NF)


@jit
def glu_forward_kernel(x, gate, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.sigmoid(tl.load(gate + at, mask=at < n))
    tl.store(y + at, tl.load(x + at, mask=at < n) * weight, mask=at < n)


@jit
def glu_backward_kernel(dy, x, gate, dx, dgate, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slope = tl.load(dy + at, mask=inside)
    weight = tl.sigmoid(tl.load(gate + at, mask=inside))
    value = tl.load(x + at, mask=inside)
    tl.store(dx + at, slope * weight, mask=inside)
    tl.store(dgate + at, slope * value * weight * (1 - weight), mask=inside)


class Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate)
        y = torch.empty_like(x)
        glu_forward_kernel[(cdiv(x.numel(), BLOCK),)](x, gate, y, x.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, gate = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        grid = (cdiv(x.numel(), BLOCK),)
        glu_backward_kernel[grid](gradients[0], x, gate, dx, dgate, x.numel(), BLOCK=BLOCK)
        return dx, dgate


@gated_sigmoid.provider("attorch", requires=("triton",), double_backward=False)
def attorch(x_NF: torch.Tensor, gate_NF: torch.Tensor) -> torch.Tensor:
    return Glu.apply(x_NF, gate_NF)
