"""The kernel that scales gradients, at offsets past 2^31."""

from __future__ import annotations

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs
from tinyllama.ops.linear_cross_entropy import linear_cross_entropy, scaled


@linear_cross_entropy.many_programs
def many_elements(ends: Ends) -> Pairs:
    factor = torch.tensor(0.7)
    return ends(lambda x: [scaled(x, factor, in_place=False)], 1, ends.room(2**31 + 2))
