"""Product of two matrices, one program a block of 16 rows and 16 columns, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def product_kernel(a, b, y, N, K, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    inside = (row < N)[:, None] & (column < D)[None, :]
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK).to(tl.int64)
        of_a = (row < N)[:, None] & (k < K)[None, :]
        of_b = (k < K)[:, None] & (column < D)[None, :]
        left = tl.load(a + row[:, None] * K + k[None, :], mask=of_a, other=0.0)
        right = tl.load(b + k[:, None] * D + column[None, :], mask=of_b, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(y + row[:, None] * D + column[None, :], total, mask=inside)


op = Op(
    "corpus_block_matrix_product",
    inputs={"a": Tensor("N K"), "b": Tensor("K D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, K=20, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(a, b):
    return a @ b


@op.provider("triton", requires=("triton",))
def candidate(a, b):
    a, b = a.contiguous(), b.contiguous()
    (N, K), D = a.shape, b.shape[1]
    y = torch.empty(N, D, dtype=a.dtype, device=a.device)
    if y.numel():
        grid = triton.cdiv(N, 16), triton.cdiv(D, 16)
        product_kernel[grid](a, b, y, N, K, D, BLOCK=16)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The number of rows is one more, so that it is never one, of which a compiler makes a constant.
    right(
        "method_of_a_number_that_is_never_one",
        ("inside = (row < N)[:, None]", "inside = (row + 1 < N.to(tl.int64))[:, None]"),
        ("of_a = (row < N)[:, None]", "of_a = (row + 1 < N)[:, None]"),
        ("(a, b, y, N, K, D, BLOCK=16)", "(a, b, y, N + 1, K, D, BLOCK=16)"),
    ),
    # A number of one is a constant, which has no methods of a tensor.
    wrong(
        "method_of_a_number_that_may_be_one",
        ("inside = (row < N)[:, None]", "inside = (row < N.to(tl.int64))[:, None]"),
        fault="configuration",
        rank="unsafe",
    ),
    # Without input_precision the products are tf32 on many GPUs.
    wrong(
        "products_in_tf32",
        (', input_precision="ieee")', ")"),
        fault="framework",
        rank="warning",
        result="y",
    ),
    # A sum of no products is never written.
    wrong(
        "sum_of_no_products_unwritten",
        ("if y.numel():", "if a.numel():"),
        fault="empty",
        result="y",
    ),
    # A sum of no products is one.
    wrong(
        "sum_of_no_products_is_one",
        ("    if y.numel():\n", "    if not K:\n        return y.fill_(1.0)\n    if y.numel():\n"),
        fault="empty",
        result="y",
    ),
]
