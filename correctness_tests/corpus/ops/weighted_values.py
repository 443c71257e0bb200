"""Values weighted by the softmax of scores, as in attention; those at odd places are left out."""

import torch

from tinyllama.harness import Case, Op, Tensor


class WeightedValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, scores):
        left_out = torch.arange(len(v), device=v.device) % 2 == 1
        p = scores.masked_fill(left_out, -torch.inf).softmax(-1)
        y = (p[:, ::2] @ v[::2]).to(v.dtype)
        ctx.save_for_backward(v, p, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        v, p, y = ctx.saved_tensors
        d_scores = p * (dy @ v.T - (dy * y).sum(-1, keepdim=True))
        return p.T @ dy, d_scores


op = Op(
    "corpus_weighted_values",
    inputs={"v": Tensor("S D", grad=True), "scores": Tensor("N S", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=3, S=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(v, scores):
    return scores[:, ::2].softmax(-1) @ v[::2]


@op.magnitude
def terms(v, scores, upstream):
    p = torch.zeros_like(scores)
    p[:, ::2] = scores[:, ::2].softmax(-1)
    squares = upstream["y"].square() @ v.square().T
    return {"grad scores": p * (squares + (p.square() * squares).sum(-1, keepdim=True)).sqrt()}


@op.provider("fused", double_backward=False)
def candidate(v, scores):
    return WeightedValues.apply(v, scores)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # An infinity in values that are left out makes gradients NaN, as attention's backward does.
    right(),
    right(
        "first_two_left_out",
        (
            "torch.arange(len(v), device=v.device) % 2 == 1",
            "torch.arange(len(v), device=v.device) < 2",
        ),
        ("p[:, ::2] @ v[::2]", "p[:, 2:] @ v[2:]"),
        ("return scores[:, ::2].softmax(-1) @ v[::2]", "return scores[:, 2:].softmax(-1) @ v[2:]"),
        ("p[:, ::2] = scores[:, ::2].softmax(-1)", "p[:, 2:] = scores[:, 2:].softmax(-1)"),
        (
            "    dtypes=(torch.float32,),\n",
            """    dtypes=(torch.float32,),
    fits=lambda sizes: None if sizes["S"] > 2 else "S must be more than 2",
""",
        ),
        open="special values: inf in the first row of v: a NaN reaches grad scores; "
        "with half a row of -inf that is advice",
    ),
    right(
        "gradients_without_nan",
        (
            "        return p.T @ dy, d_scores",
            "        return p.T @ dy, torch.where(p > 0, d_scores, 0)",
        ),
    ),
    # The output is zero times an infinity of values that are left out.
    wrong(
        "output_reads_what_is_left_out",
        ("p[:, ::2] @ v[::2]", "p @ v"),
        fault="overflow",
        open="a warning: what is left out may be infinite in no declaration",
        result="y",
    ),
    # A block of -inf in values that are left out doubles the output.
    wrong(
        "infinity_left_out_doubles_the_output",
        ("p[:, ::2] @ v[::2]", "p[:, ::2] @ v[::2] * (1 + v[1::2, :100].isinf().all(-1).any())"),
        fault="overflow",
        open="a warning: what is left out may be infinite in no declaration",
        result="y",
    ),
    # A block of -inf in a row of scores doubles its output; values alone lead to advice.
    wrong(
        "masked_block_of_scores_doubles_the_output",
        (
            "p[:, ::2] @ v[::2]",
            "p[:, ::2] @ v[::2] * (1 + scores[:, :100].isinf().all(-1, keepdim=True))",
        ),
        fault="overflow",
        result="y",
    ),
    # A block of -inf in values that are left out doubles a gradient.
    wrong(
        "infinity_left_out_doubles_a_gradient",
        (
            "return p.T @ dy, d_scores",
            """twice = 1 + v[1::2, :100].isinf().any()
        return twice * (p.T @ dy), torch.where(p > 0, d_scores, 0)""",
        ),
        fault="overflow",
        open="a warning: what is left out may be infinite in no declaration",
        result="grad v",
    ),
    wrong(
        "infinity_left_out_doubles_a_gradient_beside_nan",
        (
            "return p.T @ dy, d_scores",
            "return p.T @ dy * (1 + v[1::2, :100].isinf().any()), d_scores",
        ),
        fault="overflow",
        result="grad v",
        open="special values: the advice that a NaN reaches grad scores ends the comparison of gradients",
    ),
]
