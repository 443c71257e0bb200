"""A residual sum and its norm in one kernel, as a published ultra-fused block has it.

sum = x + residual; y = sum rstd w with rstd = 1 / sqrt(mean(sum^2) + eps).

The published program is fast, its memory is low, and its loss looks right. Find out what is wrong:
`tinyllama check` on this file says whether there is more to find.
"""

import torch
import triton
import triton.language as tl

from tinyllama.ops.add_rms_norm import add_rms_norm


@triton.jit
def fused_kernel(x, residual, n, total, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    there = at < D
    a = tl.load(x + row + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(residual + row + at, mask=there, other=0.0).to(tl.float32)
    s = a + b
    scale = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    tl.store(total + row + at, s.to(total.dtype.element_ty), mask=there)
    tl.store(n + row + at, (s * scale).to(n.dtype.element_ty), mask=there)


def fused(x, residual, n, total, eps):
    """One launch; where Triton cannot run, PyTorch."""
    try:
        D = x.shape[-1]
        block = triton.next_power_of_2(D)
        fused_kernel[(x.numel() // D,)](x, residual, n, total, D, BLOCK=block)
    except Exception:
        total.copy_(x + residual)
        n.copy_(torch.nn.functional.rms_norm(total.float(), total.shape[-1:], eps=eps))


@add_rms_norm.provider("lesson", requires=("triton",), double_backward=False)
def lesson(x, residual, weight, eps):
    n, total = torch.empty_like(x), torch.empty_like(x)
    with torch.no_grad():
        fused(x, residual, n, total, eps)
    return n * weight, total
