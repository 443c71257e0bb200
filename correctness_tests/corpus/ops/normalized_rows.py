"""Rows divided by their norm, or by eps where that is larger, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class NormalizedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        norm = x.norm(dim=1, keepdim=True)
        divisor = norm.clamp(min=eps)
        y = x / divisor
        ctx.save_for_backward(y, divisor, norm > eps)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        y, divisor, longer = ctx.saved_tensors
        along = torch.where(longer, (dy * y).sum(1, keepdim=True), 0.0)
        return (dy - y * along) / divisor, None


op = Op(
    "corpus_normalized_rows",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=50)],
    params={"eps": 1e-12},
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, eps):
    return torch.nn.functional.normalize(x, dim=1, eps=eps)


@op.provider("explicit", double_backward=False)
def candidate(x, eps):
    return NormalizedRows.apply(x, eps)


# variants
from correctness_tests.corpus.variants import right, wrong

CALL = "    return NormalizedRows.apply(x, eps)\n"

VARIANTS = [
    right(),
    right(
        "eps_of_zero_refused",
        (CALL, '    if eps == 0:\n        raise ValueError("eps is 0")\n' + CALL),
    ),
    # Rows that are shorter than 1e-6 are divided by it.
    wrong(
        "eps_of_zero_replaced_by_a_default",
        (CALL, "    return NormalizedRows.apply(x, eps or 1e-6)\n"),
        fault="constant",
        result="y",
    ),
    # Where a row is shorter than eps its gradient still is that of a division by its norm.
    wrong(
        "gradient_of_a_row_shorter_than_eps",
        (
            "torch.where(longer, (dy * y).sum(1, keepdim=True), 0.0)",
            "(dy * y).sum(1, keepdim=True)",
        ),
        fault="constant",
        open="a warning: no row is about as long as eps",
        result="grad x",
    ),
]
