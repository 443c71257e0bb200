"""FlagGems' kernels as providers, a file for each op, and what they import from around them."""

import contextlib
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

from tinyllama.harness.kernels.foreign import foreign

# The first of the configurations for NVIDIA's GPUs, with smaller blocks: programs are interpreted.
TUNED: dict[str, dict[str, int]] = {
    "layer_norm_persistent": {},
    "layer_norm_loop": {"TILE_N": 1024},
    "layer_norm_backward": {"BLOCK_ROW_SIZE": 1, "BLOCK_COL_SIZE": 64},
    "weight_bias_backward": {"BLOCK_ROW_SIZE": 32, "BLOCK_COL_SIZE": 4},
}


def kernels(name: str) -> ModuleType:
    """A module of `flag_gems.ops`, without the package around it, which asks for a vendor."""
    import triton
    from triton import language as tl

    runtime = {
        "get_tuned_config": lambda name: [triton.Config(TUNED[name], num_warps=4)],
        "torch_device_fn": SimpleNamespace(device=lambda device: contextlib.nullcontext()),
    }
    around: dict[str, dict[str, Any]] = {
        "flag_gems.runtime": runtime,
        "flag_gems.ops.zeros": {"zero_": lambda out: out.zero_()},
        "flag_gems.utils.triton_lang_helper": {"use_tl_extra": lambda function: function},
    }
    packages = ["flag_gems", "flag_gems.utils", "flag_gems.ops"]
    with foreign(hollow=packages, instead=around):
        utils: Any = importlib.import_module("flag_gems.utils")
        utils.libentry = lambda: lambda kernel: kernel
        utils.tl_extra_shim = tl
        importlib.import_module("flag_gems.utils.triton_lang_extension")
        around_ops: Any = importlib.import_module("flag_gems")
        around_ops.runtime = importlib.import_module("flag_gems.runtime")
        return importlib.import_module(f"flag_gems.ops.{name}")
