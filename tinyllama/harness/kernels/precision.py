"""The precision of products: asked for by the caller, stated to every kernel, never a default."""

import functools
from typing import Any

import torch

from tinyllama.harness.kernels.chips import chip_of, dot_precisions
from tinyllama.harness.kernels.parameter_memory import rounded

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPE_OF = {short: dtype for dtype, short in SHORT.items()}


def input_precision(x: torch.Tensor) -> str:
    """The ``input_precision`` of `tl.dot` for operands like x.

    For float32: "tf32" where `torch.set_float32_matmul_precision` allows it and the chip has it.
    Where it does not, products have float32's accuracy: "tf32x3" on chips that offer it, three
    products of tf32 halves, whose errors were measured to be those of "ieee" or less at a
    quarter of the time (docs/design.md); elsewhere "ieee". For 16-bit operands "ieee".
    """
    if x.dtype is not torch.float32:
        return "ieee"
    offered = dot_precisions(chip_of(x.device))
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return precision if precision in offered else "ieee"


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of products of x: autocast's where it is on, else x's own."""
    if x.dtype is torch.float32 and torch.is_autocast_enabled(kind := autocast_kind(x)):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def autocast_kind(x: torch.Tensor) -> str:
    """The device type whose autocast holds for x; a tensor without memory counts as a GPU's."""
    return "cpu" if x.is_cpu else "cuda"


class _Rounded(torch.autograd.Function):
    """A rounded copy in place of a cast: the gradient goes to what was rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in this dtype: the copy that `rounded` offers, or else a cast."""
    copy = rounded.of(x, dtype)
    return x.to(dtype) if copy is None else _Rounded.apply(x, copy)


def product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, into: torch.Tensor | None = None
) -> torch.Tensor:
    """a (M K) @ b (K N) -> (M N) in ``dtype``, accumulated in float32. into: the memory for it.

    A 16-bit product with a float32 result is rounded nowhere in between where the BLAS offers
    that (torch 2.8 and later, on a GPU); elsewhere its result is rounded once to 16 bits.
    """
    if dtype is a.dtype:
        return torch.mm(a, b, out=into)
    if a.device.type == "cuda" and _mixed_products(a.device):
        return torch.mm(a, b, out_dtype=dtype, out=into)
    narrow = torch.mm(a, b)
    return narrow.to(dtype) if into is None else into.copy_(narrow)


@functools.cache
def _mixed_products(device: torch.device) -> bool:
    """Whether a bfloat16 product can give float32 here."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return torch.mm(ones, ones, out_dtype=torch.float32).dtype is torch.float32
    except (TypeError, RuntimeError):
        return False
