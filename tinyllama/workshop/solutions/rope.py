"""Rotary position embedding in PyTorch: each pair is turned by its angle.

Autograd makes the backward pass: it turns the gradient back, by the angle's negative.
"""

import torch

from tinyllama.ops.rope import rope
from tinyllama.workshop.blanks import refuse_blanks

refuse_blanks(__file__)


def turned(x, cos, sin, interleaved):
    """x (B T H K), tables (T C) with C = K / 2; computed in the tables' dtype."""
    cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2
    first = x[..., 0::2] if interleaved else x[..., :half]
    second = x[..., 1::2] if interleaved else x[..., half:]
    new_first = first * cos - second * sin
    new_second = first * sin + second * cos
    if not interleaved:  # a pair is one element of each half
        return torch.cat((new_first, new_second), -1).to(x.dtype)
    return torch.stack((new_first, new_second), -1).flatten(-2).to(x.dtype)


@rope.provider("lesson")
def lesson(q, k, cos, sin, interleaved=True):
    return turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)
