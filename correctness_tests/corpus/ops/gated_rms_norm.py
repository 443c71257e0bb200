"""RMSNorm of rows, times silu of a gate, with the gradients of all three inputs, in Triton.

After mamba_ssm.ops.triton.layernorm_gated of mamba-ssm 2.3.2.post1, a kernel in wide use.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal


@triton.jit
def forward_kernel(x, weight, z, y, rstd, D, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * D + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(rstd + row, factor)
    tl.store(y + row * D + column, value * factor * gain * gate * tl.sigmoid(gate), mask=inside)


@triton.jit
def backward_kernel(x, weight, z, rstd, dy, dx, dw, dz, N, D, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < D
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        at = row.to(tl.int64) * D + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(rstd + row)
        share = tl.sigmoid(gate)
        normed = value * factor
        slope = share * (1.0 + gate * (1.0 - share))
        tl.store(dz + at, upstream * normed * gain * slope, mask=inside)
        upstream *= gate * share
        of_weight += upstream * normed
        upstream *= gain
        inner = tl.sum(upstream * normed, 0) / D
        tl.store(dx + at, factor * (upstream - normed * inner), mask=inside)
    tl.store(dw + tl.program_id(0).to(tl.int64) * D + column, of_weight, mask=inside)


class GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, z, eps):
        x, weight, z = x.contiguous(), weight.contiguous(), z.contiguous()
        N, D = x.shape
        y = torch.empty(N, D, dtype=x.dtype, device=x.device)
        rstd = torch.empty(N, dtype=torch.float32, device=x.device)
        if y.numel():
            BLOCK = triton.next_power_of_2(D)
            forward_kernel[(N,)](x, weight, z, y, rstd, D, eps, BLOCK=BLOCK)
        ctx.save_for_backward(x, weight, z, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, z, rstd = ctx.saved_tensors
        N, D = x.shape
        dx, dz = torch.empty_like(x), torch.empty_like(z)
        programs = min(N, 64)
        dw = torch.empty(programs, D, dtype=torch.float32, device=x.device)
        if x.numel():
            BLOCK = triton.next_power_of_2(D)
            backward_kernel[(programs,)](
                x, weight, z, rstd, dy.contiguous(), dx, dw, dz, N, D, BLOCK=BLOCK
            )
        return dx, dw.sum(0).to(weight.dtype), dz, None


op = Op(
    "corpus_gated_rms_norm",
    inputs={
        "x": Tensor("N D", grad=True),
        "weight": Tensor("D", grad=True, values=normal(0.3, mean=1.0)),
        "z": Tensor("N D", grad=True),
    },
    params={"eps": 1e-6},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=32), Case(N=3, D=20, why="a width that is no power of two")],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(x, weight, z, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    value, gate = x.to(wide), z.to(wide)
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight
    return (normed * torch.nn.functional.silu(gate)).to(x.dtype)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, weight, z, eps):
    return GatedNorm.apply(x, weight, z, eps)


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [right()]
