"""The versions that a result depends on."""

from __future__ import annotations

import importlib.util
import platform

import numpy as np
import torch

import tinyllama


def versions() -> dict[str, str]:
    """By name: this package, Python, torch, what torch was built for, triton and numpy.

    What is not there is left out. triton is asked itself, since its distribution has another
    name in each build of torch.
    """
    found = {
        "tinyllama": tinyllama.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "numpy": np.__version__,
    }
    if importlib.util.find_spec("triton"):
        import triton

        found["triton"] = triton.__version__
    return {name: str(version) for name, version in found.items() if version is not None}
