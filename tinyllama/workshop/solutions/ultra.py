"""A residual sum and its norm in one kernel, as a published ultra-fused block has it.

sum = x + residual; y = sum rstd w with rstd = 1 / sqrt(mean(sum^2) + eps).

The published program is fast, its memory is low, and its loss looks right. Find out what is wrong:
`tinyllama check` on this file says whether there is more to find.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Tensor
from tinyllama.ops.add_rms_norm import add_rms_norm


@triton.jit
def fused_kernel(x, residual, weight, y, total, rstd, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    there = at < D
    a = tl.load(x + row + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(residual + row + at, mask=there, other=0.0).to(tl.float32)
    s = (a + b).to(total.dtype.element_ty)  # the norm is of the rounded sum
    wide = s.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    tl.store(total + row + at, s, mask=there)
    tl.store(y + row + at, (wide * scale * w).to(y.dtype.element_ty), mask=there)
    tl.store(rstd + tl.program_id(0), scale)


@add_rms_norm.provider(
    "lesson",
    keep=("weight",),
    saved={"total": Tensor("B T D"), "rstd": Tensor("B T", dtype=torch.float32)},
    requires=("triton",),
    double_backward=False,
)
class Lesson:
    @staticmethod
    def forward(x, residual, weight, eps):
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        y, total, D = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if x.numel():
            block = triton.next_power_of_2(D)
            grid = (x.numel() // D,)
            fused_kernel[grid](x, residual, weight, y, total, rstd, D, eps, BLOCK=block)
        return y, total, total.clone(), rstd

    @staticmethod
    def backward(grads, kept, saved, needs, eps):
        weight, total = kept["weight"].float(), saved["total"].float()
        rstd = saved["rstd"][..., None]
        ds = torch.zeros_like(total)
        dweight = torch.zeros_like(weight)
        if grads[0] is not None:
            n, g = total * rstd, grads[0].float()
            ds += rstd * (g * weight - n * (n * g * weight).mean(-1, keepdim=True))
            dweight += (g * n).reshape(-1, len(weight)).sum(0)
        if grads[1] is not None:
            ds += grads[1].float()
        ds = ds.to(saved["total"].dtype)
        return {"x": ds, "residual": ds.clone(), "weight": dweight.to(kept["weight"].dtype)}
