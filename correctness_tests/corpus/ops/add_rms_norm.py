"""The tree's residual addition and RMSNorm, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.add_rms_norm import add_rms_norm as op


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        total = x + residual
        rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(total, weight, rstd)
        y = total * rstd * weight
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        normed, scaled = total * rstd, dy * weight
        dx = rstd * (scaled - normed * (normed * scaled).mean(-1, keepdim=True))
        dx = dx + dtotal
        dresidual = dx
        dweight = (dy * normed).reshape(-1, total.shape[-1]).sum(0)
        return dx, dresidual, dweight, None


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(x, residual, weight, eps):
    return AddRMSNorm.apply(x, residual, weight, eps)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)
# The last element of the last row stays as it was allocated.
tail = partial(wrong, fault="tail", rank="unsafe")

VARIANTS = [
    right(),
    missing("gradient_of_x_lost", ("return dx, dres", "return None, dres")),
    missing(
        "gradient_of_x_zero",
        ("return dx, dres", "return torch.zeros_like(dx), dres"),
        result="grad x",
    ),
    constant(
        "gradient_of_x_1_percent_off",
        ("return dx, dres", "return 1.01 * dx, dres"),
        result="grad x",
    ),
    constant(
        "gradient_of_residual_1_percent_off",
        ("dresidual = dx", "dresidual = 1.01 * dx"),
        result="grad residual",
    ),
    constant(
        "gradient_of_weight_1_percent_off",
        ("dweight = (", "dweight = 1.01 * ("),
        result="grad weight",
    ),
    constant("y_1_percent_off", ("y = total", "y = 1.01 * total"), result="y"),
    constant("sum_1_percent_off", ("return y, total", "return y, 1.01 * total"), result="sum"),
    constant("epsilon_dropped", (" + eps)", ")")),
    # The gradient of the sum goes through the norm's, instead of beside it.
    constant(
        "residual_on_the_wrong_side",
        ("dy * weight", "(dy + dtotal) * weight"),
        ("        dx = dx + dtotal\n", ""),
    ),
    # A gradient that does not come is taken for ones.
    missing(
        "absent_gradient_taken_for_ones",
        (
            "        total = x + residual\n",
            "        ctx.set_materialize_grads(False)\n        total = x + residual\n",
        ),
        (
            "        normed, scaled",
            """        dy = torch.ones_like(total) if dy is None else dy
        dtotal = torch.ones_like(total) if dtotal is None else dtotal
        normed, scaled""",
        ),
        as_reference=False,
    ),
    tail(
        "tail_of_y_unwritten",
        (
            "        y = total * rstd * weight\n",
            """        y = total.new_empty(total.shape)
        y.view(-1)[:-1] = (total * rstd * weight).reshape(-1)[:-1]
""",
        ),
        result="y",
    ),
    tail(
        "tail_of_sum_unwritten",
        (
            "        return y, total\n",
            """        written = total.new_empty(total.shape)
        written.view(-1)[:-1] = total.reshape(-1)[:-1]
        return y, written
""",
        ),
        result="sum",
    ),
]
