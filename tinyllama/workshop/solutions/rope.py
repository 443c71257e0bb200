"""Rotary position embedding in PyTorch: each pair (even, odd) is turned by its angle.

Autograd makes the backward pass: it turns the gradient back, by the angle's negative.
"""

import torch

from tinyllama.ops.rope import rope
from tinyllama.workshop.blanks import refuse_blanks

refuse_blanks(__file__)


def turned(x, cos, sin):
    """x (B T H K), tables (T C) with C = K / 2; computed in the tables' dtype."""
    cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    new_even = even * cos - odd * sin
    new_odd = even * sin + odd * cos
    return torch.stack((new_even, new_odd), -1).flatten(-2).to(x.dtype)


@rope.provider("lesson")
def lesson(q, k, cos, sin):
    return turned(q, cos, sin), turned(k, cos, sin)
