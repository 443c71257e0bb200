"""Group norm of two groups of channels, one program a group, in Triton. Each declared group fills
its block."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def norm_kernel(x, w, b, y, C, L, SIZE, eps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    start = program.to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / SIZE
    centred = tl.where(inside, value - mean, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    channel = (program % 2) * (C // 2) + at // L
    gain = tl.load(w + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(b + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + at, centred * factor * gain + bias, mask=inside)


op = Op(
    "corpus_two_group_norm",
    fits=lambda sizes: "C must be even" if sizes["C"] % 2 else None,
    inputs={"x": Tensor("N C L"), "w": Tensor("C"), "b": Tensor("C")},
    params={"eps": 1e-5},
    outputs={"y": "N C L"},
    cases=[Case(N=2, C=4, L=16), Case(N=3, C=8, L=64, why="more channels")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, w, b, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    N, C, L = x.shape
    value = x.to(wide).reshape(N, 2, -1)
    value = value - value.mean(-1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value.reshape(N, C, L) * w[:, None] + b[:, None]).to(x.dtype)


@op.independent("torch.nn.functional.group_norm")
def stock(x, w, b, eps):
    return torch.nn.functional.group_norm(x, 2, w, b, eps)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, w, b, eps):
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    N, C, L = x.shape
    y = torch.empty(N, C, L, dtype=x.dtype, device=x.device)
    if y.numel():
        size = C // 2 * L
        norm_kernel[(N * 2,)](x, w, b, y, C, L, size, eps, BLOCK=triton.next_power_of_2(size))
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("every_dtype", ("    dtypes=(torch.float32,),\n", "")),
    # Behind the end of a group, zero less the mean is squared too.
    wrong(
        "variance_over_the_padding",
        ("tl.where(inside, value - mean, 0.0)", "value - mean"),
        fault="tail",
        result="y",
    ),
]
