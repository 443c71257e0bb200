"""gelu(a) times b, with gelu in the form of a tanh and both gradients, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def gate_of(v):
    z = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    return tl.sigmoid(2.0 * z)


@triton.jit
def forward_kernel(a, b, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(a + at, mask=at < n, other=0.0).to(tl.float32)
    factor = tl.load(b + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, v * gate_of(v) * factor, mask=at < n)


@triton.jit
def backward_kernel(a, b, dy, da, db, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(a + at, mask=at < n, other=0.0).to(tl.float32)
    factor = tl.load(b + at, mask=at < n, other=0.0).to(tl.float32)
    upstream = tl.load(dy + at, mask=at < n, other=0.0).to(tl.float32)
    gate = gate_of(v)
    slope = 2.0 * 0.7978845608028654 * (1.0 + 3 * 0.044715 * v * v)
    bend = gate * (1.0 - gate)
    of_gelu = gate + tl.where(bend == 0.0, 0.0, v * bend * slope)
    tl.store(da + at, upstream * factor * of_gelu, mask=at < n)
    tl.store(db + at, upstream * v * gate, mask=at < n)


class Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        if n := a.numel():
            forward_kernel[(triton.cdiv(n, 256),)](a, b, y, n, BLOCK=256)
        ctx.save_for_backward(a, b)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        db = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        if n := a.numel():
            backward_kernel[(triton.cdiv(n, 256),)](a, b, dy.contiguous(), da, db, n, BLOCK=256)
        return da, db


op = Op(
    "corpus_tanh_geglu",
    inputs={"a": Tensor("N D", grad=True), "b": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=101, why="an odd number of elements")],
)


@op.reference
def eager(a, b):
    wide = torch.promote_types(a.dtype, torch.float32)
    return (torch.nn.functional.gelu(a.to(wide), approximate="tanh") * b.to(wide)).to(a.dtype)


@op.independent("a sigmoid(2 z) b")
def written_out(a, b):
    return a * torch.sigmoid(2 * 0.7978845608028654 * (a + 0.044715 * a**3)) * b


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(a, b):
    return Geglu.apply(a, b)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Above about 44 the quotient is inf / inf.
    wrong(
        "tanh_by_exponentials",
        (
            "    return tl.sigmoid(2.0 * z)",
            "    e = tl.exp(2.0 * z)\n    return 0.5 * (1.0 + (e - 1.0) / (e + 1.0))",
        ),
        fault="overflow",
        result="y",
    ),
]
