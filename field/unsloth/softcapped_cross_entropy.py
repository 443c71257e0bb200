"""Cross-entropy of logits that are capped by a tangent, as Gemma 2 trains."""

import torch

from field.sampling import TOKENS
from field.unsloth import kernels
from tinyllama.harness import Op, Tensor
from tinyllama.ops.cross_entropy import TARGETS

released = kernels("cross_entropy_loss")

softcapped_cross_entropy = Op(
    "softcapped_cross_entropy",
    inputs={"logits": Tensor("N V", grad=True), "targets": TARGETS},
    params={"cap": 30.0},
    outputs={"losses": "N"},
    cases=TOKENS,
    dtypes=(torch.float32,),
)


@softcapped_cross_entropy.reference
def eager(logits_NV: torch.Tensor, targets_N: torch.Tensor, cap: float) -> torch.Tensor:
    capped_NV = cap * torch.tanh(logits_NV / cap)
    return torch.nn.functional.cross_entropy(capped_NV, targets_N, reduction="none")


@softcapped_cross_entropy.provider("unsloth", requires=("triton",), double_backward=False)
def unsloth(logits_NV: torch.Tensor, targets_N: torch.Tensor, cap: float) -> torch.Tensor:
    return released.Fast_CrossEntropyLoss.apply(logits_NV.contiguous().clone(), targets_N, cap, 0)
