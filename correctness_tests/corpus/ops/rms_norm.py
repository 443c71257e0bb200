"""The tree's RMSNorm, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.rms_norm import rms_norm as op


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        y = x * rstd * weight
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        normed, scaled = x * rstd, dy * weight
        dx = rstd * (scaled - normed * (normed * scaled).mean(-1, keepdim=True))
        each_row = (dy * normed).reshape(-1, x.shape[-1])
        dweight = each_row.sum(0)
        return dx, dweight, None


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(x, weight, eps):
    return RMSNorm.apply(x, weight, eps)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_x_lost", ("return dx, dweight", "return None, dweight")),
    missing(
        "gradient_of_x_zero",
        ("return dx, dweight", "return torch.zeros_like(dx), dweight"),
        result="grad x",
    ),
    constant("gradient_of_x_1_percent_off", ("dx = rstd", "dx = 1.01 * rstd"), result="grad x"),
    constant(
        "gradient_of_weight_1_percent_off",
        ("dweight = each_row", "dweight = 1.01 * each_row"),
        result="grad weight",
    ),
    constant("y_1_percent_off", ("y = x * rstd", "y = 1.01 * x * rstd"), result="y"),
    constant("epsilon_dropped", (" + eps)", ")")),
    # The mean is taken over the next power of two.
    constant(
        "mean_of_the_padded_row",
        (
            ".square().mean(-1, keepdim=True)",
            ".square().sum(-1, keepdim=True) / (1 << (x.shape[-1] - 1).bit_length())",
        ),
        result="y",
    ),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "        y = x * rstd * weight\n",
            """        y = x.new_empty(x.shape)
        y.view(-1)[:-1] = (x * rstd * weight).reshape(-1)[:-1]
""",
        ),
        fault="tail",
        result="y",
        rank="unsafe",
    ),
    # Rows that do not fill a block of four have no gradient.
    wrong(
        "last_rows_without_gradient",
        (
            "        return dx, dweight",
            """        rows = dx.view(-1, dx.shape[-1])
        rows[len(rows) // 4 * 4 :] = 0
        return dx, dweight""",
        ),
        fault="tail",
        result="grad x",
        as_reference=True,
    ),
    # The rows' gradients are added in bfloat16.
    wrong(
        "weight_gradient_in_bf16",
        (
            "        dweight = each_row.sum(0)\n",
            """        dweight = torch.zeros_like(weight, dtype=torch.bfloat16)
        for row in each_row:
            dweight += row.to(torch.bfloat16)
        dweight = dweight.to(weight.dtype)
""",
        ),
        fault="accumulation",
        result="grad weight",
        as_reference=True,
    ),
]
