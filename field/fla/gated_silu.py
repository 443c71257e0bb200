"""The product of a gate's SiLU and another input."""

import importlib
import warnings

import torch

from tinyllama.harness.kernels.foreign import foreign
from tinyllama.ops.silu_mul import silu_mul

with foreign(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that no GPU is there
    released = importlib.import_module("fla.modules.activations")


@silu_mul.provider("fla", requires=("triton",), dtypes=(torch.float32,), double_backward=False)
def fla(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    return released.swiglu(gate_NF, up_NF)
