"""The index of the largest element of each row, the first of equal ones, in blocks of 128 columns,
in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def index_kernel(x, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    place = 0
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + column, mask=column < D, other=-float("inf")).to(tl.float32)
        v = tl.where(v != v, float("inf"), v)
        of_block = tl.max(v, 0)
        first = tl.min(tl.where((v == of_block) & (column < D), column, 2147483647), 0)
        place = tl.where(of_block > largest, first, place)
        largest = tl.maximum(largest, of_block)
    tl.store(y + row, place.to(tl.int64))


op = Op(
    "corpus_first_largest",
    inputs={"x": Tensor("N D")},
    outputs={"y": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=4, D=64), Case(N=3, D=300, why="three blocks, the last of them ragged")],
)


@op.reference
def eager(x):
    return torch.argmax(x, -1)


@op.independent("the first of a stable sort")
def written_out(x):
    return x.sort(dim=-1, descending=True, stable=True).indices[:, 0]


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x):
    x = x.contiguous()
    y = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    if x.numel():
        index_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=128)
    return y


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [right()]
