"""The sum of the absolute differences of two matrices, by one program, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def sum_kernel(x, y, loss, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        difference = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        difference -= tl.load(y + at, mask=at < n, other=0.0).to(tl.float32)
        total += tl.abs(difference)
    tl.store(loss, tl.sum(total, 0))


op = Op(
    "corpus_absolute_difference_sum",
    inputs={"x": Tensor("N D"), "y": Tensor("N D")},
    outputs={"loss": Tensor("", dtype=torch.float32)},
    cases=[Case(N=4, D=64), Case(N=7, D=101, why="several blocks, the last of them ragged")],
)


@op.reference
def eager(x, y):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) - y.to(wide)).abs().sum()


@op.independent("torch.nn.functional.l1_loss")
def stock(x, y):
    return torch.nn.functional.l1_loss(x, y, reduction="sum")


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    if n := x.numel():
        sum_kernel[(1,)](x, y, loss, n, BLOCK=512)
    return loss


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "loss_of_no_elements_unwritten",
        ("loss = torch.zeros(", "loss = torch.empty("),
        fault="empty",
        result="loss",
    ),
]
