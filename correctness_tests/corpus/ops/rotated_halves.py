"""Rotary embedding of pairs (i, i + K / 2), one program a token's head, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def rotate_kernel(x, cos, sin, y, T, H, R, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    token = program // H % T
    r = tl.arange(0, BLOCK)
    first, second = program * 2 * R + r, program * 2 * R + R + r
    a = tl.load(x + first, mask=r < R, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=r < R, other=0.0).to(tl.float32)
    c = tl.load(cos + token * R + r, mask=r < R, other=0.0).to(tl.float32)
    s = tl.load(sin + token * R + r, mask=r < R, other=0.0).to(tl.float32)
    tl.store(y + first, a * c - b * s, mask=r < R)
    tl.store(y + second, b * c + a * s, mask=r < R)


op = Op(
    "corpus_rotated_halves",
    fits=lambda sizes: "K must be 2 R" if sizes["K"] != 2 * sizes["R"] else None,
    inputs={"x": Tensor("B T H K"), "cos": Tensor("T R"), "sin": Tensor("T R")},
    outputs={"y": "B T H K"},
    cases=[
        Case(B=2, T=5, H=2, K=16, R=8),
        Case(B=1, T=7, H=3, K=20, R=10, why="ragged heads"),
    ],
)


@op.reference
def eager(x, cos, sin):
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).chunk(2, -1)
    c, s = cos.to(wide)[:, None, :], sin.to(wide)[:, None, :]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


@op.independent("a complex product")
def written_out(x, cos, sin):
    a, b = x.chunk(2, -1)
    z = torch.complex(a.contiguous(), b.contiguous()) * torch.complex(cos, sin)[:, None, :]
    return torch.cat([z.real, z.imag], -1)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, cos, sin):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    B, T, H, K = x.shape
    if x.numel():
        BLOCK = triton.next_power_of_2(K // 2)
        rotate_kernel[(B * T * H,)](x, cos, sin, y, T, H, K // 2, BLOCK=BLOCK)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A dense tensor's .contiguous() is the caller's tensor itself.
    wrong(
        "rotated_in_place",
        ("y = torch.empty_like(x)", "y = x"),
        fault="aliasing",
        rank="unsafe",
        result="x",
    ),
]
