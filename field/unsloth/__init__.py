"""unsloth's kernels as providers, a file for each op, and what they import from around them."""

import contextlib
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tinyllama.harness.kernels import next_power_of_2
from tinyllama.harness.kernels.foreign import foreign

SETTINGS = {
    "MAX_FUSED_SIZE": 65536,
    "calculate_settings": lambda width: (next_power_of_2(width), 4),
    "norm_num_warps": lambda table, width, warps, device: warps,
    "is_cdna": lambda: False,
    "long_indexing": lambda *tensors, block=0: False,
    "next_power_of_2": next_power_of_2,
    "torch_gpu_device": lambda device: contextlib.nullcontext(),
    "torch_device_stream": lambda device: SimpleNamespace(synchronize=lambda: None),
}
AROUND: dict[str, dict[str, Any]] = {
    "unsloth.device_type": {"DEVICE_COUNT": 1, "DEVICE_TYPE_TORCH": "cpu"},
    "transformers.models.llama.modeling_llama": {"LlamaRMSNorm": torch.nn.Module, "logger": None},
    "unsloth_zoo.utils": {"Version": lambda text: tuple(map(int, text.split(".")[:2]))},
    "unsloth_zoo.loss_utils": {},
}


def kernels(name: str) -> ModuleType:
    """A module of `unsloth.kernels`, without the package around it, which asks for a GPU."""
    from triton import language as tl
    from triton.language.extra import libdevice

    settings = {**SETTINGS, "triton_cast": tl.cast, "triton_tanh": libdevice.tanh}
    around = {**AROUND, "unsloth.kernels.utils": settings}
    with foreign(hollow=["unsloth", "unsloth.kernels"], instead=around):
        return importlib.import_module(f"unsloth.kernels.{name}")
