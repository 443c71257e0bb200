"""The settings of the process that a call must leave as they are, and must not depend on: torch's,
and the states of random number generators."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

SEED = 20_111_117  # that no candidate sets
SUBNORMAL = 1e-40  # a float32
CUDA = torch.backends.cuda


class Setting(NamedTuple):
    """How a setting is read, and set to what was read. unusual: from the present value, one with
    which a right call works, and which a call that changes the setting has not set before."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    unusual: Callable[[Any], Any]


def _always(value: Any) -> Callable[[Any], Any]:
    """What a new process has, where a call need not work with anything else."""
    return lambda present: value


def _opposite(on: bool) -> bool:
    return not on


def _of_autocast(kind: str) -> dict[str, Setting]:
    half, bf16 = torch.float16, torch.bfloat16
    return {
        f"whether autocast is on for {kind}": Setting(
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
            _always(False),
        ),
        f"the dtype of autocast for {kind}": Setting(
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
            lambda present: half if present is bf16 else bf16,
        ),
    }


def _set_default_device(device: torch.device) -> None:
    """The CPU is torch's own default: set by name, a mode of torch stays active for it."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _subnormals_are_zero() -> bool:
    return not torch.tensor(SUBNORMAL, dtype=torch.float32, device="cpu").mul(1.0).item()


def _deterministic() -> tuple[bool, bool]:
    on = torch.are_deterministic_algorithms_enabled()
    return on, torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(on_and_warning: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(on_and_warning[0], warn_only=on_and_warning[1])


SETTINGS = {
    "whether gradients are computed": Setting(
        torch.is_grad_enabled, torch.set_grad_enabled, _always(True)
    ),
    "whether algorithms are deterministic": Setting(
        _deterministic, _set_deterministic, _always((False, False))
    ),
    "the default dtype": Setting(
        torch.get_default_dtype, torch.set_default_dtype, _always(torch.float32)
    ),
    "the default device": Setting(
        torch.get_default_device, _set_default_device, lambda present: present
    ),
    "the precision of float32 products": Setting(
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        lambda present: "high" if present == "highest" else "highest",
    ),
    **{
        f"torch.backends.{path}.{name}": Setting(
            partial(getattr, owner, name), partial(setattr, owner, name), _opposite
        )
        for path, owner, name in (
            ("cuda.matmul", CUDA.matmul, "allow_fp16_reduced_precision_reduction"),
            ("cuda.matmul", CUDA.matmul, "allow_bf16_reduced_precision_reduction"),
            ("cudnn", torch.backends.cudnn, "benchmark"),
            ("cudnn", torch.backends.cudnn, "deterministic"),
        )
    },
    "whether attention may be torch's flash attention": Setting(
        CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, _opposite
    ),
    "whether attention may save memory": Setting(
        CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, _opposite
    ),
    "whether attention may be torch's own formula": Setting(
        CUDA.math_sdp_enabled, CUDA.enable_math_sdp, _always(True)
    ),
    **_of_autocast("cpu"),
    **_of_autocast("cuda"),
    "the number of threads": Setting(
        torch.get_num_threads, torch.set_num_threads, lambda present: 4 if present == 3 else 3
    ),
    "whether subnormal numbers are zero": Setting(
        _subnormals_are_zero, torch.set_flush_denormal, _opposite
    ),
    "torch's random numbers": Setting(
        torch.get_rng_state,
        torch.set_rng_state,
        lambda present: torch.Generator().manual_seed(SEED).get_state(),
    ),
    "Python's random numbers": Setting(
        random.getstate, random.setstate, lambda present: random.Random(SEED).getstate()
    ),
    "NumPy's random numbers": Setting(
        np.random.get_state,
        np.random.set_state,
        lambda present: np.random.RandomState(SEED).get_state(),
    ),
}


def snapshot() -> dict[str, Any]:
    """The value of every setting."""
    return {name: setting.get() for name, setting in SETTINGS.items()}


def restore(before: Mapping[str, Any]) -> list[str]:
    """Set what differs from this snapshot, and return its names."""
    names = [name for name, value in before.items() if not _same(SETTINGS[name].get(), value)]
    for name in names:
        SETTINGS[name].set(before[name])
    return names


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    return bool(np.array_equal(value, other))


def set_unusual() -> None:
    """Give settings values that no call has set before."""
    for setting in SETTINGS.values():
        setting.set(setting.unusual(setting.get()))


@contextlib.contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    """Meanwhile, the setting has this value."""
    before = SETTINGS[name].get()
    SETTINGS[name].set(value)
    try:
        yield
    finally:
        SETTINGS[name].set(before)
