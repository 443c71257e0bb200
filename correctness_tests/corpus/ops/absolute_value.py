"""The distance of each element from zero, whose gradient is its sign."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_absolute_value",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.abs()


class Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.abs(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * x.detach().sign()


@op.provider("function", double_backward=False)
def candidate(x):
    return Distance.apply(x)


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [
    # Its second derivative by x is zero, and absent. That by dy is there: this is of rank contract.
    right(),
    right("second_derivative_declared", (", double_backward=False", "")),
    right(
        "once_differentiable",
        ("    def backward", "    @torch.autograd.function.once_differentiable\n    def backward"),
    ),
]
