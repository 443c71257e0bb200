"""A product of matrices, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.to(w.dtype)
        dx = dy @ w.mT
        dw = x.mT @ dy
        return dx, dw


op = Op(
    "corpus_row_product",
    inputs={"x": Tensor("N D", grad=True), "w": Tensor("D M", grad=True)},
    outputs={"y": "N M"},
    cases=[Case(N=5, D=16, M=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, w):
    return x @ w


@op.provider("derived_by_hand")
def candidate(x, w):
    return RowProduct.apply(x, w)


# variants
from correctness_tests.corpus.variants import right, wrong


def added(product):
    """The edit by which the gradient of w is added to zeros, row by row."""
    return (
        "        dw = x.mT @ dy\n",
        f"""\
        rows = torch.arange(len(w), device=w.device)
        dw = torch.zeros_like(w).index_add(0, rows, {product})
""",
    )


VARIANTS = [
    right(),
    right("plain_product", ("RowProduct.apply(x, w)", "x @ w")),
    right("sum_in_the_dtype_of_the_weight", added("(x.mT @ dy).to(w.dtype)")),
    # Under autocast the product is in bfloat16, and is added to a tensor in float32.
    wrong("dtypes_in_backward_under_autocast", added("x.mT @ dy"), fault="framework"),
]
