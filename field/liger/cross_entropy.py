"""Cross-entropy as it is called: on the caller's logits, which it writes its gradient over."""

import torch

from tinyllama.harness.kernels.foreign import foreign
from tinyllama.ops.cross_entropy import NO_TARGET, cross_entropy

with foreign():
    from liger_kernel.ops import cross_entropy as released


@cross_entropy.provider(
    "liger", requires=("triton",), dtypes=(torch.float32,), double_backward=False, waits=True
)
def liger(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    ignored = NO_TARGET if ignore_index is None else ignore_index
    apply = released.LigerCrossEntropyFunction.apply
    return apply(logits_NV, targets_N, None, ignored, 0.0, 0.0, reduction)[0]
