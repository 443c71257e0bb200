"""The tree's transpose, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.transpose import transpose as op


class Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.new_empty((x.shape[1], x.shape[0]))
        y.copy_(x.T)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = dy.T.clone(memory_format=torch.contiguous_format)
        return dx


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(x):
    return Transpose.apply(x)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    right(
        "every_dtype",
        (", dtypes=(torch.float32,)", ""),
    ),
    missing("gradient_lost", ("return dx", "return None")),
    missing("gradient_zero", ("return dx", "return torch.zeros_like(dx)"), result="grad x"),
    constant("gradient_1_percent_off", ("return dx", "return 1.01 * dx"), result="grad x"),
    constant("y_1_percent_off", ("y.copy_(x.T)", "y.copy_(1.01 * x.T)"), result="y"),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        ("y.copy_(x.T)", "y.view(-1)[:-1] = x.T.reshape(-1)[:-1]"),
        fault="tail",
        result="y",
        rank="unsafe",
    ),
]
