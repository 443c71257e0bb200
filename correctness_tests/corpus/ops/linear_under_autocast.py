"""A linear layer that computes in the dtype of autocast, with both gradients, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def product_kernel(a, b, y, M, N, K, a_m, a_k, b_k, b_n, BLOCK: tl.constexpr):
    across = tl.cdiv(N, BLOCK)
    m = ((tl.program_id(0) // across) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    n = ((tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        of_a = (m < M)[:, None] & (k < K)[None, :]
        of_b = (k < K)[:, None] & (n < N)[None, :]
        left = tl.load(a + m[:, None] * a_m + k[None, :] * a_k, mask=of_a, other=0.0)
        right = tl.load(b + k[:, None] * b_k + n[None, :] * b_n, mask=of_b, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def product(a, b):
    (M, K), N = a.shape, b.shape[1]
    y = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if y.numel():
        grid = (triton.cdiv(M, 16) * triton.cdiv(N, 16),)
        product_kernel[grid](a, b, y, M, N, K, *a.stride(), *b.stride(), BLOCK=16)
    return y


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        device, narrow_x, narrow_w = x.device.type, x, w
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            narrow_x, narrow_w = x.to(dtype), w.to(dtype)
        ctx.save_for_backward(narrow_x, narrow_w)
        return product(narrow_x, narrow_w.T)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return product(dy, w), product(dy.T, x)


op = Op(
    "corpus_linear_under_autocast",
    inputs={"x": Tensor("M K", grad=True), "w": Tensor("N K", grad=True)},
    outputs={"y": "M N"},
    cases=[Case(M=16, K=32, N=16), Case(M=5, K=40, N=35, why="ragged tiles")],
)


@op.reference
def eager(x, w):
    return torch.nn.functional.linear(x, w)


@op.independent("einsum")
def written_out(x, w):
    return torch.einsum("mk,nk->mn", x, w)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, w):
    return Linear.apply(x, w)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right(
        "autocast_of_a_gpu_or_the_cpu",
        ("device, narrow_x, narrow_w = x.device.type, x, w", "narrow_x, narrow_w = x, w"),
        ("        if torch", '        device = "cuda" if x.is_cuda else "cpu"\n        if torch'),
    ),
    # Backward multiplies a bfloat16 gradient with the float32 weight, which fails.
    wrong(
        "weight_saved_in_its_dtype",
        ("ctx.save_for_backward(narrow_x, narrow_w)", "ctx.save_for_backward(narrow_x, w)"),
        fault="framework",
        rank="refused",
        result="dtype",
    ),
]
