"""The product and the sum of two tensors, with a backward pass that is told of absent gradients."""

import torch

from tinyllama.harness import Case, Op, Tensor


class ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, of_product, of_sum):
        x, w = ctx.saved_tensors
        if of_product is None:
            return of_sum, of_sum.clone()
        if of_sum is None:
            return of_product * w, of_product * x
        return of_product * w + of_sum, of_product * x + of_sum


op = Op(
    "corpus_product_and_sum",
    inputs={"x": Tensor("N D", grad=True), "w": Tensor("N D", grad=True)},
    outputs={"product": "N D", "sum": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, w):
    return x * w, x + w


@op.provider("explicit", double_backward=False)
def candidate(x, w):
    return ProductAndSum.apply(x, w)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Where x alone is wanted, and the sum has no gradient, the factor is forgotten.
    wrong(
        "product_alone_of_x_alone",
        (
            "        if of_sum is None:\n",
            "        if of_sum is None and not ctx.needs_input_grad[1]:\n"
            "            return of_product, None\n"
            "        if of_sum is None:\n",
        ),
        fault="gradient missing",
        result="grad x",
    ),
]
