"""Cross-entropy of each token: ``reduction="none"``, to be weighted or masked by the caller."""

import torch

from field.sampling import TOKENS
from tinyllama.harness import Op, Tensor
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.ops.cross_entropy import TARGETS

with foreign():
    from liger_kernel.ops import cross_entropy as released

token_cross_entropy = Op(
    "token_cross_entropy",
    inputs={"logits": Tensor("N V", grad=True), "targets": TARGETS},
    outputs={"losses": "N"},
    cases=TOKENS,
    dtypes=(torch.float32,),
)


@token_cross_entropy.reference
def eager(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    true_N = wide_NV.gather(-1, targets_N[:, None])[:, 0]
    return (wide_NV.logsumexp(-1) - true_N).to(logits_NV.dtype)


@token_cross_entropy.provider("liger", requires=("triton",), double_backward=False, waits=True)
def liger(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """It writes its gradient over the logits, so it is given a copy."""
    apply = released.LigerCrossEntropyFunction.apply
    return apply(logits_NV.clone(), targets_N, None, -100, 0.0, 0.0, "none")[0]
