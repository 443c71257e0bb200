"""Cumulative products along rows, with a backward pass that goes through the row once."""

import torch

from tinyllama.harness import Case, Op, Tensor


class CumulativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.cumprod(-1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        before = torch.cat([torch.ones_like(y[:, :1]), y[:, :-1]], -1)
        dx, tail = torch.empty_like(x), x.new_zeros(len(x))
        for column in reversed(range(x.shape[-1])):
            tail = tail + dy[:, column]
            dx[:, column] = tail * before[:, column]
            tail = tail * x[:, column]
        return dx


op = Op(
    "corpus_cumulative_product",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=12)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.cumprod(-1)


@op.provider("fused", double_backward=False)
def candidate(x):
    return CumulativeProduct.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The gradient divides by an element, which may be zero.
    wrong(
        "gradient_divides_by_an_element",
        (
            """dx, tail = torch.empty_like(x), x.new_zeros(len(x))
        for column in reversed(range(x.shape[-1])):
            tail = tail + dy[:, column]
            dx[:, column] = tail * before[:, column]
            tail = tail * x[:, column]
        return dx""",
            "return (dy * y).flip(-1).cumsum(-1).flip(-1) / x",
        ),
        fault="overflow",
        result="grad x",
    ),
]
