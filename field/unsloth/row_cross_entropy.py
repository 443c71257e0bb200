"""Cross-entropy of each row, as it is called: on the caller's logits."""

import torch

from field.sampling import TOKENS
from field.unsloth import kernels
from tinyllama.harness import Op, Tensor
from tinyllama.ops.cross_entropy import TARGETS

released = kernels("cross_entropy_loss")

row_cross_entropy = Op(
    "row_cross_entropy",
    inputs={"logits": Tensor("N V", grad=True), "targets": TARGETS},
    outputs={"losses": "N"},
    cases=TOKENS,
    dtypes=(torch.float32,),
)


@row_cross_entropy.reference
def eager(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")


@row_cross_entropy.provider("unsloth", requires=("triton",), double_backward=False)
def unsloth(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return released.Fast_CrossEntropyLoss.apply(logits_NV, targets_N, 0, 0)
