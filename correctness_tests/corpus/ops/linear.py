"""The tree's projection, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.linear import linear as op


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x @ w.T
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dy @ w.to(dy.dtype)
        rows, upstream = x.to(dy.dtype).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dw = upstream.T @ rows
        return dx.to(x.dtype), dw.to(w.dtype)


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(x, w):
    return Linear.apply(x, w)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_x_lost", ("return dx.to(x.dtype),", "return None,")),
    missing(
        "gradient_of_x_zero", ("return dx.to", "return torch.zeros_like(dx).to"), result="grad x"
    ),
    constant("gradient_of_x_1_percent_off", ("dx = dy", "dx = 1.01 * dy"), result="grad x"),
    constant(
        "gradient_of_w_1_percent_off",
        ("dw = upstream.T", "dw = 1.01 * upstream.T"),
        result="grad w",
    ),
    constant("y_1_percent_off", ("y = x @", "y = 1.01 * x @"), result="y"),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "        y = x @ w.T\n",
            """        y = x.new_empty((*x.shape[:-1], w.shape[0]))
        y.view(-1)[:-1] = (x @ w.T).view(-1)[:-1]
""",
        ),
        fault="tail",
        result="y",
        rank="unsafe",
    ),
]
