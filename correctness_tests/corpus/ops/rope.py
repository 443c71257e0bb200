"""The tree's rotary embedding, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.rope import rope as op


def turned(x, cos, sin):
    """Pairs (2i, 2i + 1) of the last axis, turned by the angle of their position."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        q_rotated = turned(q, cos, sin)
        k_rotated = turned(k, cos, sin)
        return q_rotated, k_rotated

    @staticmethod
    @once_differentiable
    def backward(ctx, dq_rotated, dk_rotated):
        cos, sin = ctx.saved_tensors
        back = -sin
        dq = turned(dq_rotated, cos, back)
        dk = turned(dk_rotated, cos, back)
        return dq, dk, None, None


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(q, k, cos, sin, interleaved):
    if not interleaved:  # the two halves of a head become pairs
        q, k = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (q, k))
    rotated = Rotation.apply(q, k, cos, sin)
    if interleaved:
        return rotated
    return tuple(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in rotated)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing")


# The last element of the last row stays as it was allocated.
tail = partial(wrong, fault="tail", rank="unsafe")

VARIANTS = [
    right(),
    right(
        "every_dtype",
        (", dtypes=(torch.float32,)", ""),
    ),
    missing(
        "gradient_of_k_lost",
        ("apply(q, k, cos, sin)", "apply(q, k.detach(), cos, sin)"),
        result="grad k",
    ),
    missing("gradient_of_q_lost", ("return dq, dk", "return None, dk"), as_reference=True),
    missing(
        "gradient_of_q_zero",
        ("dq = turned(dq_rotated, cos, back)", "dq = torch.zeros_like(dq_rotated)"),
        result="grad q",
        as_reference=True,
    ),
    constant("gradient_of_q_1_percent_off", ("dq = turned", "dq = 1.01 * turned"), result="grad q"),
    constant("gradient_of_k_1_percent_off", ("dk = turned", "dk = 1.01 * turned"), result="grad k"),
    constant("turned_the_same_way_backward", ("back = -sin", "back = sin"), result="grad q"),
    constant(
        "q_1_percent_off", ("q_rotated = turned", "q_rotated = 1.01 * turned"), result="q_rotated"
    ),
    constant(
        "k_1_percent_off", ("k_rotated = turned", "k_rotated = 1.01 * turned"), result="k_rotated"
    ),
    tail(
        "tail_of_q_unwritten",
        (
            "        q_rotated = turned(q, cos, sin)\n",
            """        q_rotated = q.new_empty(q.shape)
        q_rotated.view(-1)[:-1] = turned(q, cos, sin).reshape(-1)[:-1]
""",
        ),
        result="q_rotated",
    ),
    tail(
        "tail_of_k_unwritten",
        (
            "        k_rotated = turned(k, cos, sin)\n",
            """        k_rotated = k.new_empty(k.shape)
        k_rotated.view(-1)[:-1] = turned(k, cos, sin).reshape(-1)[:-1]
""",
        ),
        result="k_rotated",
    ),
    # A token is turned by the angle of the one after it.
    constant(
        "one_position_late",
        (
            "    rotated = Rotation",
            "    cos, sin = cos.roll(-1, 0), sin.roll(-1, 0)\n    rotated = Rotation",
        ),
        result="q_rotated",
    ),
    # Pairs are (i, i + K / 2) instead of (2i, 2i + 1).
    constant(
        "halves_rotated",
        (".unflatten(-1, (-1, 2)).unbind(-1)", ".chunk(2, -1)"),
        (
            "torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)",
            "torch.cat((a * c - b * s, a * s + b * c), -1)",
        ),
        result="q_rotated",
    ),
    # A single key head is left as it was.
    constant(
        "one_head_forgotten",
        (
            "k_rotated = turned(k, cos, sin)",
            "k_rotated = turned(k, cos, sin) if k.shape[2] > 1 else k.clone()",
        ),
        result="k_rotated",
    ),
]
