"""Rows of 8-bit integers times a scale for each row; ``triton.autotune`` chooses the block."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import integers


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 64}, num_warps=2),
        triton.Config({"BLOCK": 128}, num_warps=4),
        triton.Config({"BLOCK": 256}, num_warps=4),
    ],
    key=["D"],
)
@triton.heuristics({"EVEN": lambda arguments: arguments["D"] % arguments["BLOCK"] == 0})
@triton.jit
def scale_kernel(q, scale, y, D, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + row)
    if EVEN:
        value = tl.load(q + row * D + column)
        tl.store(y + row * D + column, value.to(tl.float32) * factor)
    else:
        value = tl.load(q + row * D + column, mask=column < D, other=0)
        tl.store(y + row * D + column, value.to(tl.float32) * factor, mask=column < D)


op = Op(
    "corpus_dequantised_rows",
    inputs={
        "q": Tensor("N D", dtype=torch.int8, values=integers(127)),
        "scale": Tensor("N", dtype=torch.float32),
    },
    outputs={"y": Tensor("N D", dtype=torch.float32)},
    cases=[
        Case(N=4, D=128),
        Case(N=3, D=100, why="a ragged row"),
        Case(N=3, D=384, why="three blocks"),
    ],
    dtypes=(torch.float32,),
)


@op.reference
def eager(q, scale):
    return q.to(scale.dtype) * scale[:, None]


@op.independent("einsum")
def written_out(q, scale):
    return torch.einsum("nd,n->nd", q.to(scale.dtype), scale)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(q, scale):
    q, scale = q.contiguous(), scale.contiguous()
    N, D = q.shape
    y = torch.empty(N, D, dtype=torch.float32, device=q.device)
    if y.numel():
        scale_kernel[lambda meta: (N, triton.cdiv(D, meta["BLOCK"]))](q, scale, y, D)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A multiple of 128 is taken for even blocks, but one configuration has blocks of 256.
    wrong(
        "even_by_the_block_of_another_configuration",
        ('arguments["D"] % arguments["BLOCK"] == 0', 'arguments["D"] % 128 == 0'),
        fault="configuration",
        rank="unsafe",
    ),
]
