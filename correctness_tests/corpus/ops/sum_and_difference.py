"""The sum and the difference of two matrices, whose upstream gradients may be absent."""

import torch

from tinyllama.harness import Case, Op, Tensor


class SumAndDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return a + b, a - b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dz):
        if dy is None:
            return dz, -dz
        if dz is None:
            return dy, dy.clone()
        return dy + dz, dy - dz


op = Op(
    "corpus_sum_and_difference",
    inputs={"a": Tensor("N D", grad=True), "b": Tensor("N D", grad=True)},
    outputs={"y": "N D", "z": "N D"},
    cases=[Case(N=3, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(a, b):
    return a + b, a - b


@op.provider("function", double_backward=False)
def candidate(a, b):
    return SumAndDifference.apply(a, b)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # An absent upstream gradient is refused, which the reference takes.
    wrong(
        "absent_upstream_gradient_refused",
        ("            return dz, -dz\n", '            raise ValueError("y has no gradient")\n'),
        fault="gradient missing",
        rank="refused",
        result="y has no gradient",
    ),
    wrong(
        "sign_where_an_upstream_gradient_is_absent",
        ("return dz, -dz", "return dz, dz.clone()"),
        fault="gradient missing",
        result="grad b",
    ),
]
