"""relu(x w + bias) in tiles that ``triton.autotune`` chooses, with strides of the inputs."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.autotune(
    configs=[
        triton.Config({"BM": 16, "BN": 16, "BK": 16}, num_warps=2),
        triton.Config({"BM": 32, "BN": 32, "BK": 32}, num_warps=4),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def product_kernel(
    x, w, bias, y, M, N, K, x_m, x_k, w_k, w_n, b_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    program = tl.program_id(0)
    m = ((program // across) * BM + tl.arange(0, BM)).to(tl.int64)
    n = ((program % across) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, K, BK):
        k = (start + tl.arange(0, BK)).to(tl.int64)
        of_x = (m < M)[:, None] & (k < K)[None, :]
        of_w = (k < K)[:, None] & (n < N)[None, :]
        left = tl.load(x + m[:, None] * x_m + k[None, :] * x_k, mask=of_x, other=0.0)
        right = tl.load(w + k[:, None] * w_k + n[None, :] * w_n, mask=of_w, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    total += tl.load(bias + n * b_n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    total = tl.where(total < 0.0, 0.0, total)
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


op = Op(
    "corpus_relu_projection",
    inputs={"x": Tensor("M K"), "w": Tensor("K N"), "bias": Tensor("N")},
    outputs={"y": "M N"},
    cases=[
        Case(M=16, K=32, N=16),
        Case(M=33, K=32, N=20, why="ragged tiles"),
        Case(M=5, K=40, N=70, why="K is no multiple of every BK"),
    ],
)


@op.reference
def eager(x, w, bias):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.relu(x.to(wide) @ w.to(wide) + bias.to(wide)).to(x.dtype)


@op.independent("einsum and a maximum")
def written_out(x, w, bias):
    return (torch.einsum("mk,kn->mn", x, w) + bias).clamp(min=0)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, w, bias):
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = lambda meta: (triton.cdiv(M, meta["BM"]) * triton.cdiv(N, meta["BN"]),)  # noqa: E731
        product_kernel[grid](x, w, bias, y, M, N, K, *x.stride(), *w.stride(), *bias.stride())
    return y


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [right()]
