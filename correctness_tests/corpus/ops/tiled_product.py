"""The product of two matrices by tiles of 16 rows and 16 columns, in Triton. Each declared K is a
multiple of 16.

After gpu-mode/lectures issue 51.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def product_kernel(a, b, y, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        of_a = (m < M)[:, None] & (k < K)[None, :]
        of_b = (k < K)[:, None] & (n < N)[None, :]
        left = tl.load(a + m[:, None] * K + k[None, :], mask=of_a, other=0.0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=of_b, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


op = Op(
    "corpus_tiled_product",
    inputs={"a": Tensor("M K"), "b": Tensor("K N")},
    outputs={"y": "M N"},
    cases=[Case(M=16, K=32, N=16), Case(M=20, K=16, N=24, why="ragged rows and columns")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(a, b):
    return a @ b


@op.provider("triton", requires=("triton",))
def candidate(a, b):
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[1]
    y = torch.zeros(M, N, dtype=a.dtype, device=a.device)
    if y.numel():
        product_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 16))](a, b, y, M, N, K, BLOCK=16)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The last step along K loads what lies behind the end of each row.
    wrong(
        "steps_along_k_unmasked",
        (" & (k < K)[None, :]", ""),
        ("(k < K)[:, None] & (n < N)", "(n < N)"),
        fault="tail",
        rank="unsafe",
    ),
]
