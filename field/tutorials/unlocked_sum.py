"""The sum of rows under a lock that is released without a barrier."""

import torch

from field.tutorials.locked_sum import declared, summed

unlocked_sum = declared("unlocked_sum")


@unlocked_sum.provider(
    "tutorials",
    requires=("triton",),
    double_backward=False,
    deterministic={"cpu"},
    races={"locked_sum.locked_kernel": "the lock orders the stores"},
)
def tutorials(x_ND: torch.Tensor) -> torch.Tensor:
    return summed(x_ND, barrier=False)
