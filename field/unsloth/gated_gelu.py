"""The product of a gate's GELU and another input, forward alone."""

import torch
import torch.nn.functional as F

from field.unsloth import kernels
from tinyllama.harness import Case, Op, Tensor

released = kernels("geglu")

gated_gelu = Op(
    "gated_gelu",
    inputs={"gate": Tensor("B T F"), "up": Tensor("B T F")},
    outputs={"h": "B T F"},
    cases=[
        Case(B=2, T=3, F=40),
        Case(B=1, T=1, F=16, why="one row"),
        Case(B=2, T=5, F=150, why="several blocks, and a tail"),
    ],
    dtypes=(torch.float32,),
)
gated_gelu.reference(lambda gate_BTF, up_BTF: F.gelu(gate_BTF) * up_BTF)


@gated_gelu.provider("unsloth", requires=("triton",), double_backward=False)
def unsloth(gate_BTF: torch.Tensor, up_BTF: torch.Tensor) -> torch.Tensor:
    return released.geglu_exact_forward_kernel(gate_BTF, up_BTF)
