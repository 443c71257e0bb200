"""Twice a stack of matrices, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


def doubled(x):
    return 2 * x


class DoubledStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = doubled(x)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = doubled(dy)
        return dx


AXES = "B T D"

op = Op(
    "corpus_doubled_stack",
    inputs={"x": Tensor(AXES, grad=True)},
    outputs={"y": AXES},
    cases=[Case(B=3, T=4, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return 2 * x


@op.provider("derived_by_hand")
def candidate(x):
    return DoubledStack.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

AS_A_MATRIX = """\
def doubled_rows(x):
    dense = x.stride()[-2:] == (x.shape[-1], 1) and 0 not in x.stride()
    if x.numel() and dense:
        rows = x.as_strided((x.numel() // x.shape[-1], x.shape[-1]), (x.shape[-1], 1))
        return (2 * rows).view(x.shape)
    return 2 * x


class DoubledStack("""
HELPER = "class DoubledStack(", AS_A_MATRIX
HEADS = (
    ('AXES = "B T D"', 'AXES = "B H T D"'),
    ("Case(B=3, T=4, D=8)", "Case(B=3, H=2, T=4, D=8)"),
)

VARIANTS = [
    right(),
    right("heads", *HEADS),
    right("plain_product", ("DoubledStack.apply(x)", "2 * x")),
    # A stack is read as one matrix if its last two axes are dense, although rows were cut off.
    wrong(
        "strides_of_two_axes",
        HELPER,
        ("y = doubled(x)", "y = doubled_rows(x)"),
        fault="layout",
        result="y",
    ),
    wrong(
        "strides_of_two_axes_of_heads",
        *HEADS,
        HELPER,
        ("y = doubled(x)", "y = doubled_rows(x)"),
        fault="layout",
        result="y",
    ),
    # Likewise the upstream gradient.
    wrong(
        "strides_of_two_axes_in_backward",
        HELPER,
        ("dx = doubled(dy)", "dx = doubled_rows(dy)"),
        fault="layout",
        result="grad x",
    ),
]
