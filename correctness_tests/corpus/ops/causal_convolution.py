"""A causal convolution of each channel, one program a block of 128 times, with both gradients, in
Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def filter_kernel(x, w, y, C, T, W, BLOCKS, FLIP: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = row % C
    start = tl.program_id(0) % BLOCKS * BLOCK
    t = start + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(W):
        gain = tl.load(w + channel * W + W - 1 - back).to(tl.float32)
        at = t + back if FLIP else t - back
        inside = (at >= 0) & (at < T) & (t < T)
        v = tl.load(x + row * T + at, mask=inside, other=0.0).to(tl.float32)
        total += gain * v
    tl.store(y + row * T + t, total, mask=t < T)


@triton.jit
def weight_kernel(x, dy, dw, B, C, T, W, BLOCK: tl.constexpr):
    channel = tl.program_id(0) // W
    back = W - 1 - tl.program_id(0) % W
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        row = (channel + b * C).to(tl.int64)
        for start in range(0, T, BLOCK):
            t = start + tl.arange(0, BLOCK)
            at = t - back
            v = tl.load(x + row * T + at, mask=(at >= 0) & (t < T), other=0.0).to(tl.float32)
            total += v * tl.load(dy + row * T + t, mask=t < T, other=0.0).to(tl.float32)
    tl.store(dw + tl.program_id(0), tl.sum(total, 0))


def filtered(x, w, flip):
    B, C, T = x.shape
    y = torch.empty(B, C, T, dtype=x.dtype, device=x.device)
    if y.numel():
        blocks = triton.cdiv(T, 128)
        filter_kernel[(B * C * blocks,)](x, w, y, C, T, w.shape[1], blocks, FLIP=flip, BLOCK=128)
    return y


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        return filtered(x, w, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = filtered(dy, w, True)
        if ctx.needs_input_grad[1]:
            (B, C, T), W = x.shape, w.shape[1]
            dw = torch.empty(C, W, dtype=w.dtype, device=w.device)
            if dw.numel():
                weight_kernel[(C * W,)](x, dy, dw, B, C, T, W, BLOCK=128)
        return dx, dw


op = Op(
    "corpus_causal_convolution",
    inputs={"x": Tensor("B C T", grad=True), "w": Tensor("C W", grad=True)},
    outputs={"y": "B C T"},
    cases=[
        Case(B=1, C=2, T=40, W=4),
        Case(B=1, C=2, T=300, W=3, why="three blocks, another width"),
    ],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, w):
    wide = torch.promote_types(x.dtype, torch.float32)
    W = w.shape[1]
    padded = torch.nn.functional.pad(x.to(wide), (max(0, W - 1), 0))
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for k in range(W):
        y = y + w.to(wide)[:, k, None] * padded[..., k : k + x.shape[-1]]
    return y.to(x.dtype)


@op.independent("torch.nn.functional.conv1d")
def stock(x, w):
    y = torch.nn.functional.conv1d(x, w[:, None], padding=w.shape[1] - 1, groups=w.shape[0])
    return y[..., : x.shape[-1]]


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, w):
    return Convolution.apply(x, w)


# variants
from correctness_tests.corpus.variants import right, wrong

TAPS = "special values: an infinite tap times the zeros behind the end makes grad x NaN"

VARIANTS = [
    right(open=TAPS),
    right("every_dtype", ("    dtypes=(torch.float32,),\n", ""), open=TAPS),
    right(
        "no_products_behind_the_end",
        ("total += gain * v", "total += tl.where((at < T) & (t < T), gain * v, 0.0)"),
    ),
    # The times before a block are taken for zeros. No declared case has a second block.
    wrong(
        "times_before_the_block_lost",
        ("inside = (at >= 0)", "inside = (at >= start)"),
        (
            'T=300, W=3, why="three blocks, another width"',
            'T=24, W=3, why="another width"',
        ),
        fault="tail",
        result="y",
    ),
]
