"""Rows added to a matrix at the row that an index gives, one program a row, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import integers


@triton.jit
def add_kernel(x, index, y, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.load(index + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(y + segment * D + column, value, mask=inside)


op = Op(
    "corpus_segment_sum",
    fits=lambda sizes: "rows need a segment" if sizes["N"] and not sizes["S"] else None,
    inputs={
        "base": Tensor("S D"),
        "x": Tensor("N D"),
        "index": Tensor("N", dtype=torch.int64, values=lambda sizes: integers(max(1, sizes["S"]))),
    },
    outputs={"y": "S D"},
    cases=[Case(S=4, D=32, N=10), Case(S=3, D=50, N=40, why="many rows for each segment")],
)


@op.reference
def eager(base, x, index):
    wide = torch.promote_types(x.dtype, torch.float32)
    return base.to(wide).index_add(0, index, x.to(wide)).to(x.dtype)


@op.independent("a product with one-hot rows")
def written_out(base, x, index):
    return base + torch.nn.functional.one_hot(index.long(), base.shape[0]).to(x.dtype).T @ x


@op.provider(
    "triton", requires=("triton",), double_backward=False, deterministic=frozenset({"cpu"})
)
def candidate(base, x, index):
    x, index = x.contiguous(), index.contiguous()
    N, D = x.shape
    y = torch.empty(base.shape, dtype=torch.float32, device=x.device).copy_(base)
    if x.numel():
        add_kernel[(N,)](x, index, y, D, BLOCK=triton.next_power_of_2(D))
    return y.to(x.dtype)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right(
        "without_saying_that_rows_need_a_segment",
        (
            '    fits=lambda sizes: "rows need a segment" if sizes["N"] and not sizes["S"] else None,\n',
            "",
        ),
    ),
    # Programs of the same segment may read the sum at the same time, and lose each other's rows.
    wrong(
        "added_without_atomics",
        (
            "    tl.atomic_add(y + segment * D + column, value, mask=inside)\n",
            """\
    total = tl.load(y + segment * D + column, mask=inside, other=0.0)
    tl.store(y + segment * D + column, total + value, mask=inside)
""",
        ),
        fault="race",
        rank="unsafe",
    ),
]
