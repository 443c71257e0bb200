"""Products of the matrices of two batches by tiles, with strides of the inputs, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def product_kernel(a, b, y, M, N, K, a_b, a_m, a_k, b_b, b_k, b_n, BLOCK: tl.constexpr):
    across = tl.cdiv(N, BLOCK)
    tiles = tl.cdiv(M, BLOCK) * across
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    m = ((tile // across) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    n = ((tile % across) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    a += batch * a_b
    b += batch * b_b
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        of_a = (m < M)[:, None] & (k < K)[None, :]
        of_b = (k < K)[:, None] & (n < N)[None, :]
        left = tl.load(a + m[:, None] * a_m + k[None, :] * a_k, mask=of_a, other=0.0)
        right = tl.load(b + k[:, None] * b_k + n[None, :] * b_n, mask=of_b, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = batch * M * N + m[:, None] * N + n[None, :]
    tl.store(y + at, total, mask=(m < M)[:, None] & (n < N)[None, :])


op = Op(
    "corpus_batched_product",
    inputs={"a": Tensor("B M K"), "b": Tensor("B K N")},
    outputs={"y": "B M N"},
    cases=[Case(B=2, M=16, K=32, N=16), Case(B=3, M=20, K=17, N=35, why="ragged tiles")],
)


@op.reference
def eager(a, b):
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


@op.independent("einsum")
def written_out(a, b):
    return torch.einsum("bmk,bkn->bmn", a, b)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(a, b):
    (B, M, K), N = a.shape, b.shape[2]
    y = torch.empty(B, M, N, dtype=a.dtype, device=a.device)
    if y.numel():
        grid = (B * triton.cdiv(M, 16) * triton.cdiv(N, 16),)
        product_kernel[grid](a, b, y, M, N, K, *a.stride(), *b.stride(), BLOCK=16)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The matrices of an expanded batch do not lie M K elements apart.
    wrong(
        "stride_of_the_batch_computed",
        ("a += batch * a_b", "a += batch * M * K"),
        fault="layout",
        result="y",
    ),
]
