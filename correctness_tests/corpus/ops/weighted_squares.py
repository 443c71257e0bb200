"""Squares of elements, each times the weight of its column."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal


class WeightedSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y = x.square() * w
        ctx.save_for_backward(x, w)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return 2 * dy * w * x, (dy * x.square()).sum(0)


op = Op(
    "corpus_weighted_squares",
    inputs={
        "x": Tensor("N D", grad=True),
        "w": Tensor("D", grad=True, values=normal(0.5, mean=1.0)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=4, D=12)],
)


@op.reference
def eager(x, w):
    return x.square() * w


@op.provider("fused", double_backward=False)
def candidate(x, w):
    return WeightedSquares.apply(x, w)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The squares are recovered from the output, which is zero where a weight is.
    wrong(
        "squares_recovered_from_the_output",
        ("ctx.save_for_backward(x, w)", "ctx.save_for_backward(y, w, x.sign())"),
        (
            """x, w = ctx.saved_tensors
        return 2 * dy * w * x, (dy * x.square()).sum(0)""",
            """y, w, sign = ctx.saved_tensors
        square = y / w
        return 2 * dy * w * square.sqrt() * sign, (dy * square).sum(0)""",
        ),
        fault="overflow",
        result="grad x",
    ),
    # The memory of w is read in the dtype of x.
    wrong(
        "weight_read_in_the_dtype_of_x",
        (
            "y = x.square() * w\n        ctx",
            "w = w.contiguous().view(x.dtype)[: x.shape[-1]]\n        y = x.square() * w\n        ctx",
        ),
        fault="framework",
        result="y",
    ),
]
