"""The squares of a tensor of three axes, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dense = x.contiguous()
        ctx.save_for_backward(dense)
        return dense * dense

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (dense,) = ctx.saved_tensors
        upstream = dy.contiguous()
        return 2 * dense * upstream


op = Op(
    "corpus_squared_blocks",
    inputs={"x": Tensor("N M D", grad=True)},
    outputs={"y": "N M D"},
    cases=[Case(N=5, M=3, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x * x


@op.provider("explicit", double_backward=False)
def candidate(x):
    return Squares.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

INPUT = "dense = x.contiguous()\n"
UPSTREAM = "upstream = dy.contiguous()\n"
# Rows that lie one after another, in whatever order, are read as if they lay in order.
SWAPPED = """
        if {0}.stride(-1) == 1 and {0}.transpose(0, 1).is_contiguous():
            {1} = {0}.transpose(0, 1).reshape({0}.shape)
"""
# A tensor whose last axis is repeated is taken for one number.
BROADCAST = """
        if {0}.stride(-1) == 0:
            {1} = {0}.flatten()[:1].expand({0}.shape).contiguous()
"""
# A tensor whose middle axis is repeated is taken for one row.
SHARED = """
        if {0}.dim() == 3 and {0}.stride(1) == 0:
            {1} = {0}[:1, :1].expand({0}.shape).contiguous()
"""


def misread(name, line, code, of, into, result):
    return wrong(name, (line, line + code.format(of, into)[1:]), fault="layout", result=result)


VARIANTS = [
    right(),
    misread("input_of_swapped_axes", INPUT, SWAPPED, "x", "dense", "y"),
    misread("input_with_last_axis_expanded", INPUT, BROADCAST, "x", "dense", "y"),
    misread("input_with_middle_axis_expanded", INPUT, SHARED, "x", "dense", "y"),
    misread("upstream_of_swapped_axes", UPSTREAM, SWAPPED, "dy", "upstream", "grad x"),
    misread("upstream_with_last_axis_expanded", UPSTREAM, BROADCAST, "dy", "upstream", "grad x"),
    misread("upstream_with_middle_axis_expanded", UPSTREAM, SHARED, "dy", "upstream", "grad x"),
    wrong(
        "upstream_below_1e_9_is_zero",
        (UPSTREAM, "upstream = torch.where(dy.abs() < 1e-9, 0.0, dy)\n"),
        fault="gradient missing",
        result="grad x",
    ),
]
