"""What a device can do. Code asks for a capability, never for a vendor's name."""

import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path

import torch

from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError


def default_device() -> torch.device:
    """The first GPU where one can be used (CUDA and HIP alike), else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device meant by a name such as ``cpu``, ``cuda`` or ``cuda:1``; None: the default.

    Raises UsageError for one that is not there.
    """
    if device is None:
        return default_device()
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    of_cpu = chosen is not None and chosen.type == "cpu" and not chosen.index
    if chosen is None or not (of_cpu or chosen.type == "cuda"):
        raise UsageError(f"device {str(device)!r} is unknown: use cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"device {str(device)!r} is not there: torch sees {count} GPUs; use cpu")
    return chosen


def current(device: str | torch.device) -> torch.device:
    """A device, made the current one of this process: what names no device, as a stream that
    captures a graph does, means this one. "cuda" is the current one already. For a process that
    uses one device."""
    chosen = torch.device(device)
    if chosen.type != "cpu" and chosen.index is not None:
        torch.cuda.set_device(chosen)
    return chosen


def lost() -> str | None:
    """The error that every later call on the GPU raises in this process, or None. A kernel that
    reads outside of its memory can cause it."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return None


def device_name(device: torch.device) -> str:
    """A readable name: the GPU's, or the processor's model."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.is_file():
        model = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if model:
            return " ".join(model.group(1).split())
    return platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """The memory of a GPU, or of the machine."""
    if device.type != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def slug(name: str) -> str:
    """A device's name as a folder: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on a device is done, on all of its streams."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def cannot(capability: str, device: torch.device) -> str | None:
    """Why a device lacks a capability; None when it has it.

    Capabilities: ``gpu``, ``triton`` (importable), ``compile`` (torch.compile can build code),
    ``capture`` (device graphs), ``cooperative`` (launches whose programs wait for each other; a CPU
    interprets their phases one by one), ``tf32``, ``fp32``, ``bf16``, ``fp16``, and ``module
    NAME`` (importable).
    """
    kind, _, module = capability.partition(" ")
    if kind == "module":
        return None if importlib.util.find_spec(module) else f"{module} is not installed"
    gpu = device.type != "cpu"
    if capability == "gpu":
        return None if gpu else "no GPU is available to torch"
    if capability == "triton":
        installed = importlib.util.find_spec("triton")
        return None if installed else f"triton is not installed ({install('triton')})"
    if capability == "compile":
        if gpu:
            return cannot("triton", device)
        has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
        return None if has_compiler else "torch.compile needs a C++ compiler (g++) on the CPU"
    if capability == "capture":
        return None if gpu else "device graphs need a GPU"
    if capability == "cooperative":
        if gpu and torch.version.hip is None and torch.cuda.get_device_capability(device) < (6, 0):
            return "this GPU has no cooperative launches"
        return None
    if capability == "tf32":
        if not gpu:
            return "tf32 is a mode of a GPU's matrix units"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "this GPU's matrix units have no tf32 mode"
        return None
    if capability == "bf16":
        return None if not gpu or torch.cuda.is_bf16_supported() else "this GPU has no bf16"
    if capability in ("fp32", "fp16"):
        return None
    raise ValueError(f"unknown capability {capability!r}")
