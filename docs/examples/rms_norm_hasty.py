"""A provider for an op of the tree, with one mistake that its author's tests did not see."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Tensor
from tinyllama.ops.rms_norm import rms_norm


@triton.jit
def forward_kernel(x, weight, y, rstd, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    seen = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(seen * seen, 0) / D + eps)
    tl.store(y + row * D + column, seen * scale * gain, mask=inside)
    tl.store(rstd + row, scale)


@triton.jit
def backward_kernel(dy, x, weight, rstd, dx, dgain, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    up = tl.load(dy + row * D + column, mask=inside, other=0.0).to(tl.float32)
    seen = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(rstd + row)
    normed = seen * scale
    inner = tl.sum(up * gain * normed, 0) / D
    tl.store(dx + row * D + column, scale * (up * gain - normed * inner), mask=inside)
    tl.store(dgain + row * D + column, up * normed, mask=inside)


@rms_norm.provider(
    "hasty",
    keep=("x", "weight"),
    saved={"rstd": Tensor("B*T", dtype=torch.float32)},
    requires=("triton",),
)
class Hasty:
    @staticmethod
    def forward(x, weight, eps):
        x, D = x.contiguous(), x.shape[-1]
        y, rows = torch.empty_like(x), x.numel() // D
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            block = triton.next_power_of_2(D)
            forward_kernel[(rows,)](x, weight.contiguous(), y, rstd, D, eps, BLOCK=block)
        return y, rstd

    @staticmethod
    def backward(grads, kept, saved, needs, eps):
        x, weight, rstd = kept["x"].contiguous(), kept["weight"].contiguous(), saved["rstd"]
        dy, D = grads[0], x.shape[-1]  # the mistake: this gradient may have any strides
        dx = torch.empty_like(x)
        dgain = torch.empty(len(rstd), D, dtype=torch.float32, device=x.device)
        if len(rstd):
            block = triton.next_power_of_2(D)
            backward_kernel[(len(rstd),)](dy, x, weight, rstd, dx, dgain, D, BLOCK=block)
        return {"x": dx, "weight": dgain.sum(0).to(weight.dtype)}
