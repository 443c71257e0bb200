"""What a call leaves behind of the process's settings, and what it makes of them."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check.finding import Candidate, Problem, Rank
from tinyllama.harness.check.memory import called

SEED = 20_111_117  # that no candidate sets
THREADS = 3  # likewise
SUBNORMAL = 1e-40  # a float32
CUDA, MATMUL = torch.backends.cuda, torch.backends.cuda.matmul


@dataclass(frozen=True)
class Setting:
    """set: sets what `get` gives. other: another value than the one that is given: a call may have
    set this one before. None where a call need not work with any other."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    other: Callable[[Any], Any] | None = None


def _flag(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda on: setattr(owner, name, on), _opposite)


def _opposite(on: bool) -> bool:
    return not on


def _on(now: bool) -> bool:
    """What a setting is in a new process, where a call need not work with the opposite."""
    return True


def _off(now: bool) -> bool:
    """Likewise."""
    return False


def _of_autocast() -> Iterator[tuple[str, Setting]]:
    for kind in ("cpu", "cuda"):
        dtype = Setting(
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
            lambda now: torch.float16 if now is torch.bfloat16 else torch.bfloat16,
        )
        on = partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield f"whether autocast is on for {kind}", Setting(*on, _off)
        yield f"the dtype of autocast for {kind}", dtype


def _set_default_device(device: Any) -> None:
    """The CPU is torch's own default: set by name, a mode of torch stays active for it."""
    torch.set_default_device(None if torch.device(device).type == "cpu" else device)


def _subnormals_are_zero() -> bool:
    return not torch.tensor(SUBNORMAL, device="cpu").mul(1.0).item()


SETTINGS = {
    "whether gradients are computed": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "whether algorithms are deterministic": Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "the default device": Setting(torch.get_default_device, _set_default_device),
    "the precision of float32 products": Setting(
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        lambda now: "high" if now == "highest" else "highest",
    ),
    "the precision of sums in float16": _flag(MATMUL, "allow_fp16_reduced_precision_reduction"),
    "the precision of sums in bfloat16": _flag(MATMUL, "allow_bf16_reduced_precision_reduction"),
    "whether attention may be torch's flash attention": Setting(
        CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, _opposite
    ),
    "whether attention may save memory": Setting(
        CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, _opposite
    ),
    "whether attention may be torch's own formula": Setting(
        CUDA.math_sdp_enabled, CUDA.enable_math_sdp, _on
    ),
    "cuDNN's benchmarks": _flag(torch.backends.cudnn, "benchmark"),
    "whether cuDNN is deterministic": _flag(torch.backends.cudnn, "deterministic"),
    **dict(_of_autocast()),
    "the number of threads": Setting(
        torch.get_num_threads, torch.set_num_threads, lambda now: THREADS + (now == THREADS)
    ),
    "whether subnormal numbers are zero": Setting(
        _subnormals_are_zero, torch.set_flush_denormal, _opposite
    ),
    "the random numbers that follow": Setting(
        torch.get_rng_state, torch.set_rng_state, lambda _: torch.manual_seed(SEED).get_state()
    ),
    "Python's random numbers that follow": Setting(
        random.getstate, random.setstate, lambda _: random.Random(SEED).getstate()
    ),
    "NumPy's random numbers that follow": Setting(
        np.random.get_state, np.random.set_state, lambda _: np.random.RandomState(SEED).get_state()
    ),
}


@contextlib.contextmanager
def _others() -> Iterator[None]:
    """Meanwhile, settings have values that no call has set before."""
    usual = {name: one.get() for name, one in SETTINGS.items()}
    default = torch.get_default_dtype()
    try:
        for name, one in SETTINGS.items():
            if one.other is not None:
                one.set(one.other(usual[name]))
        yield
    finally:
        for name, one in SETTINGS.items():
            if one.other is not None or not same_setting(one.get(), usual[name]):
                one.set(usual[name])
        torch.set_default_dtype(default)


def same_setting(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_setting, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))


def left_behind(candidate: Candidate) -> Problem:
    """A call leaves settings and random numbers as the reference does. An earlier call may already
    have changed a setting. So settings first get values that no candidate sets; the default dtype
    is compared with that of a new process."""
    case = candidate.telling()
    inputs = candidate.inputs(case)
    changed = {}
    for one in (candidate.op["eager"], candidate.provider):
        with _others():
            before = {name: setting.get() for name, setting in SETTINGS.items()}
            called(replace(candidate, provider=one), inputs)
            after = {name: setting.get() for name, setting in SETTINGS.items()}
            left = [name for name, value in before.items() if not same_setting(after[name], value)]
            if one is candidate.provider and torch.get_default_dtype() is not torch.float32:
                left.append("the default dtype")
        changed[one.name] = left
    of_reference = changed[candidate.op["eager"].name]
    left = [name for name in changed[candidate.provider.name] if name not in of_reference]
    return (case, f"a call changes {' and '.join(left)}", Rank.UNSAFE) if left else None


# -- settings of others ---------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def of_others(candidate: Candidate) -> Problem:
    """A call is right where others have set another default dtype, as those do who load a model in
    bfloat16, or asked for deterministic algorithms."""
    case = candidate.telling()
    inputs = candidate.inputs(case)
    references = case.references(inputs)
    settings = {
        f"the default dtype is {d}": default_dtype(d) for d in (torch.bfloat16, torch.float64)
    }
    for what, setting in (*settings.items(), ("algorithms are deterministic", _deterministic())):
        with setting:
            found, given = called(candidate, inputs)
        if wrong := candidate.wrong(case, found, given, references):
            return case, f"where {what}: {wrong[0]}"
    return None
