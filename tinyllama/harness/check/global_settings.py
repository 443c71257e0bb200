"""The settings of the process that a call must leave as they are, and must not depend on: torch's,
and the states of random number generators."""

import contextlib
import operator
import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

SEED = 20_111_117  # that no candidate sets
SUBNORMAL = 1e-40  # a float32
HALF, BF16 = torch.float16, torch.bfloat16
CUDA, CUDNN, MATMUL = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul


def _set_default_device(device: torch.device) -> None:
    """The CPU is torch's own default: set by name, a mode of torch stays active for it."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _subnormals_are_zero() -> bool:
    return not torch.tensor(SUBNORMAL, dtype=torch.float32, device="cpu").mul(1.0).item()


def _flag(owner: Any, name: str) -> tuple[Any, ...]:
    return partial(getattr, owner, name), partial(setattr, owner, name), operator.not_


def _by_kind(name: str, unusual: Any) -> dict[str, tuple[Any, ...]]:
    get = getattr(torch, f"is_{name}" if unusual is False else f"get_{name}")
    setter = getattr(torch, f"set_{name}")
    kinds = ("cpu", "cuda")
    return {f"{name} of {k}": (partial(get, k), partial(setter, k), unusual) for k in kinds}


# How each is read, and set to what was read; and a value with which a right call works, but which a
# call that changes the setting has not set before: it may follow from the present one.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "whether gradients are computed": (torch.is_grad_enabled, torch.set_grad_enabled, True),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        0,
    ),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "the default device": (torch.get_default_device, _set_default_device, lambda device: device),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        lambda present: "high" if present == "highest" else "highest",
    ),
    "sums of products in float16": _flag(MATMUL, "allow_fp16_reduced_precision_reduction"),
    "sums of products in bfloat16": _flag(MATMUL, "allow_bf16_reduced_precision_reduction"),
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, operator.not_),
    "memory-efficient attention": (
        CUDA.mem_efficient_sdp_enabled,
        CUDA.enable_mem_efficient_sdp,
        operator.not_,
    ),
    "attention by torch's own formula": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp, True),
    "benchmarks of cuDNN": _flag(CUDNN, "benchmark"),
    "deterministic cuDNN": _flag(CUDNN, "deterministic"),
    **_by_kind("autocast_enabled", False),
    **_by_kind("autocast_dtype", lambda present: HALF if present is BF16 else BF16),
    "the number of threads": (
        torch.get_num_threads,
        torch.set_num_threads,
        lambda n: 4 if n == 3 else 3,
    ),
    "subnormal numbers": (_subnormals_are_zero, torch.set_flush_denormal, operator.not_),
    "torch's random numbers": (
        torch.get_rng_state,
        torch.set_rng_state,
        torch.Generator().manual_seed(SEED).get_state(),
    ),
    "Python's random numbers": (random.getstate, random.setstate, random.Random(SEED).getstate()),
    "NumPy's random numbers": (
        np.random.get_state,
        np.random.set_state,
        np.random.RandomState(SEED).get_state(),
    ),
}


def snapshot() -> dict[str, Any]:
    """The value of every setting."""
    return {name: get() for name, (get, *_) in SETTINGS.items()}


def restore(before: Mapping[str, Any]) -> list[str]:
    """Set what differs from this snapshot, and return its names."""
    names = [name for name, value in snapshot().items() if not _same(value, before[name])]
    for name in names:
        SETTINGS[name][1](before[name])
    return names


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, before)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, before)
    if isinstance(value, tuple):
        return len(value) == len(before) and all(map(_same, value, before))
    return bool(value == before)


def set_unusual() -> None:
    """Give settings values that no call has set before."""
    for get, setter, unusual in SETTINGS.values():
        setter(unusual(get()) if callable(unusual) else unusual)


@contextlib.contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    """Meanwhile, the setting has this value."""
    get, setter, _ = SETTINGS[name]
    before = get()
    setter(value)
    try:
        yield
    finally:
        setter(before)
