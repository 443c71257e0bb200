"""The product of two matrices (tutorial 3): autotuned, with all strides."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    import triton
    import triton.language as tl

    @triton.autotune(
        configs=[
            triton.Config({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=4),
            triton.Config({"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 32}, num_warps=4),
        ],
        key=["m", "n", "k"],
    )
    @triton.jit
    def product_kernel(  # type: ignore[no-untyped-def]
        a,
        b,
        c,
        m,
        n,
        k,
        a_row,
        a_column,
        b_row,
        b_column,
        c_row,
        c_column,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            rows, columns = at[None, :], at[:, None]
            left = tl.load(
                a + at_m * a_row + rows * a_column, mask=(at_m < m) & (rows < k), other=0.0
            )
            right = tl.load(
                b + columns * b_row + at_n * b_column, mask=(columns < k) & (at_n < n), other=0.0
            )
            total += tl.dot(left, right, input_precision="ieee")
        inside = (at_m < m) & (at_n < n)
        tl.store(c + at_m * c_row + at_n * c_column, total.to(c.dtype.element_ty), mask=inside)


matrix_product = Op(
    "matrix_product",
    inputs={"a": Tensor("M K"), "b": Tensor("K N")},
    outputs={"c": "M N"},
    cases=[
        Case(M=40, K=24, N=33),
        Case(M=16, K=16, N=16, why="one block"),
        Case(M=1, K=5, N=3, why="less than a block"),
    ],
)


@matrix_product.reference
def eager(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    return a_MK @ b_KN


@matrix_product.provider("tutorials", requires=("triton",), double_backward=False)
def tutorials(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    (M, K), N = a_MK.shape, b_KN.shape[1]
    c_MN = torch.empty((M, N), dtype=a_MK.dtype, device=a_MK.device)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(M, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK_N"])

    strides = (*a_MK.stride(), *b_KN.stride(), *c_MN.stride())
    product_kernel[grid](a_MK, b_KN, c_MN, M, N, K, *strides)
    return c_MN
