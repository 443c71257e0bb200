"""Chips: which one configurations are chosen for, and what the compiler offers for it.

A chip has the name of its instruction set: ``sm_90``, ``gfx942``; "" stands for a CPU.
"""

import contextlib
import functools
from typing import Any

import torch

from tinyllama.harness.kernels.launch_cache import AFFECTING, among

# Options whose default differs between triton's versions.
STATED = {"enable_fp_fusion": True}
CHOSEN: list[str] = []  # the last one is a recording's, in the place of the device's
_PROCESSORS: list[int] = []
AFFECTING.append(_PROCESSORS)


def chip_of(device: torch.device) -> str:
    """The chip that configurations are chosen for: the recorded one, the GPU's (``sm_90``,
    ``gfx942``), or "" on a CPU."""
    if CHOSEN:
        return CHOSEN[-1]
    return _gpu_chip(device) if device.type == "cuda" else ""


@functools.cache
def _gpu_chip(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:  # elsewhere gcnArchName is there too, and means nothing
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def _gpu_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def processors(count: int) -> contextlib.AbstractContextManager[int]:
    """Meanwhile, every device has so many processors for `processors_of`."""
    return among(_PROCESSORS, count)


def processors_of(device: torch.device) -> int:
    """The processors that a launch is divided among: the GPU's, or 2 where there is none."""
    if _PROCESSORS:
        return _PROCESSORS[-1]
    return _gpu_processors(device) if device.type == "cuda" else 2


def target_of(chip: str) -> Any:
    """Triton's name for a chip."""
    from triton.backends.compiler import GPUTarget

    if chip.startswith("sm_"):
        return GPUTarget("cuda", int(chip.removeprefix("sm_")), 32)
    return GPUTarget("hip", chip, 64 if chip.startswith("gfx9") else 32)


@functools.cache
def dot_precisions(chip: str) -> tuple[str, ...]:
    """The values of `tl.dot`'s ``input_precision`` that the compiler allows for a chip."""
    return tuple(_offered(chip).allowed_dot_input_precisions) if chip else ("ieee",)


@functools.cache
def _waits_inside(chip: str) -> bool:
    """Whether kernels of a chip can wait inside for the kernel before them."""
    if not chip.startswith("sm_") or int(chip.removeprefix("sm_")) < 90:
        return False
    from triton.language.extra import cuda

    return hasattr(_offered(chip), "launch_pdl") and hasattr(cuda, "gdc_wait")


def _offered(chip: str) -> Any:
    """The compiler's options for a chip."""
    from triton.compiler import make_backend

    return make_backend(target_of(chip)).parse_options(dict(STATED))


def dependent(device: torch.device) -> dict[str, Any]:
    """Options of a launch whose kernel begins with `begin`: where the chip has dependent launch
    (CUDA's programmatic dependent launch, from sm_90 on), it starts while the kernel before it on
    its stream ends."""
    if _waits_inside(chip_of(device)):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
