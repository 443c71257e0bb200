"""The tree's embedding, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.embedding import embedding as op


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        y = weight.index_select(0, tokens)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (tokens,) = ctx.saved_tensors
        dweight = dy.new_zeros((ctx.rows, dy.shape[1]))
        dweight.index_add_(0, tokens, dy)
        return dweight, None


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(weight, tokens):
    return Embedding.apply(weight, tokens)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_lost", ("return dweight, None", "return None, None")),
    missing(
        "gradient_zero", ("        dweight.index_add_(0, tokens, dy)\n", ""), result="grad weight"
    ),
    constant("gradient_1_percent_off", ("tokens, dy)", "tokens, 1.01 * dy)"), result="grad weight"),
    constant("y_1_percent_off", ("y = weight.index", "y = 1.01 * weight.index"), result="y"),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "        y = weight.index_select(0, tokens)\n",
            """        y = weight.new_empty((tokens.shape[0], weight.shape[1]))
        y.view(-1)[:-1] = weight.index_select(0, tokens).view(-1)[:-1]
""",
        ),
        fault="tail",
        result="y",
        rank="unsafe",
    ),
]
