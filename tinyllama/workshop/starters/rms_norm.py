"""RMSNorm as the published course has it: one program for a row, which loops over its blocks.

y = x rstd w with rstd = 1 / sqrt(mean(x^2) + eps). With n = x rstd and the upstream gradient dy:
dx = rstd (w dy - n mean(n w dy)), dw = the sum over rows of n dy.

Replace each ____ , then run `tinyllama check` on this file.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Tensor
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.workshop.blanks import refuse_blanks

refuse_blanks(__file__)

BLOCK_SIZE = 128  # try 64 to 1024


@triton.jit
def rmsnorm_kernel(
    x_ptr, weight_ptr, output_ptr, rstd_ptr, n_elements, eps, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * n_elements
    squares = tl.full((BLOCK_SIZE,), 0.0, tl.float32)
    for start in range(0, n_elements, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = ____
        x = tl.load(x_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        squares += ____
    rstd = tl.rsqrt(____)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    for start in range(0, n_elements, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = ____
        x = tl.load(x_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(output_ptr + row + offsets, ____, mask=mask)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, n_elements, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * n_elements
    rstd = tl.load(rstd_ptr + tl.program_id(0))
    products = tl.full((BLOCK_SIZE,), 0.0, tl.float32)
    for start in range(0, n_elements, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = ____
        dy = tl.load(dy_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        n = tl.load(x_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32) * rstd
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        products += ____
    mean = tl.sum(products, axis=0) / n_elements
    for start in range(0, n_elements, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = ____
        dy = tl.load(dy_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        n = tl.load(x_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32) * rstd
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + offsets, ____, mask=mask)
        tl.store(dw_ptr + row + offsets, ____, mask=mask)


@rms_norm.provider(
    "lesson",
    keep=("x", "weight"),
    saved={"rstd": Tensor("B*T", dtype=torch.float32)},
    requires=("triton",),
)
class Lesson:
    @staticmethod
    def forward(x, weight, eps):
        x, weight, D = x.contiguous(), weight.contiguous(), x.shape[-1]
        y, rows = torch.empty_like(x), x.numel() // D
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            rmsnorm_kernel[(rows,)](x, weight, y, rstd, D, eps, BLOCK_SIZE=BLOCK_SIZE)
        return y, rstd

    @staticmethod
    def backward(grads, kept, saved, needs, eps):
        x, weight, dy = (t.contiguous() for t in (kept["x"], kept["weight"], grads[0]))
        rstd, D = saved["rstd"], x.shape[-1]
        dx, rows = torch.empty_like(x), len(rstd)
        dw = torch.empty(rows, D, dtype=torch.float32, device=x.device)
        if rows:
            rmsnorm_backward_kernel[(rows,)](dy, x, weight, rstd, dx, dw, D, BLOCK_SIZE=BLOCK_SIZE)
        return {"x": dx, "weight": dw.sum(0).to(weight.dtype)}
