"""What of a process an import may change for everyone: functions and classes of torch, Triton and
the harness, torch's settings, and the environment.

before = code(), settings()
...                                     # an import
changes(before[0], code())              # name -> what it became, as a text
"""

import gc
import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

# Modules whose functions and classes are compared, with all that is inside them.
_WATCHED = ("torch", "triton", "numpy", "tinyllama.harness")
_STANDARD = ("builtins", "functools", "gc", "inspect", "math", "os", "sys", "time")
_ATEN = ("aten", "prims")  # namespaces of torch's own operators
GONE = "removed"
GENERATOR = "state of the random generator"

Snapshot = dict[str, Any]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """What was there before and is another now. What is only added changes nothing that exists,
    except in the environment and among torch's own operators."""
    found = {}
    for name, value in before.items():
        now = after.get(name, GONE)
        same = value == now if isinstance(value, str) else value is now
        if not same:
            found[name] = _shown(now)
    added = [n for n in after if n not in before and n.startswith(("environment ", "operator "))]
    return found | {name: _shown(after[name]) for name in added}


def loaded() -> set[str]:
    """The modules of torch, Triton and the rest that this process has loaded. Some of torch's
    change others when they are loaded first, which is no change of whoever needed them."""
    return {name for name in sys.modules if _watched(name)}


def _watched(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in _WATCHED)


def code() -> Snapshot:
    """By name, functions, classes and modules of torch, Triton and the harness."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if not (_watched(name) or name in _STANDARD) or not isinstance(module, types.ModuleType):
            continue
        found[f"module {name}"] = module
        for key, value in list(vars(module).items()):
            if issubclass(type(value), type):  # some deprecated objects warn when asked themselves
                found[f"{name}.{key}"] = value
                if _watched(value.__module__ or ""):
                    found |= _members(value)
            elif callable(value):
                found[f"{name}.{key}"] = value
    return found


def _members(kind: type) -> Snapshot:
    """The methods and properties of a class."""
    where = f"{kind.__module__}.{kind.__qualname__}"
    named = ((f"{where}.{key}", value) for key, value in list(vars(kind).items()))
    return {name: value for name, value in named if callable(value) or _describes(value)}


def _describes(value: object) -> bool:
    return isinstance(value, (property, staticmethod, classmethod))


def settings() -> dict[str, str]:
    """Torch's settings, its dispatcher's own operators, and the environment, as texts."""
    found = {f"torch.{name}()": _told(getattr(torch, name, None)) for name in _GETTERS}
    for device in ("cpu", "cuda"):
        found[f"autocast of {device}"] = _told(partial(torch.is_autocast_enabled, device))
        found[f"autocast dtype of {device}"] = _told(partial(torch.get_autocast_dtype, device))
    found["multithreaded backward"] = _told(torch.autograd.is_multithreading_enabled)
    found["denormals"] = str((torch.tensor([2e-310], dtype=torch.float64) * 1).item())
    found[GENERATOR] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    modes = ("_len_torch_function_stack", "_len_torch_dispatch_stack")
    found |= {name: _told(getattr(torch._C, name, None)) for name in modes}
    found |= dict(_backends())
    found |= dict(_configurations())
    overridden = getattr(torch.library, "_impls", ())
    found |= {f"operator {name}": "replaced" for name in overridden if name.startswith(_ATEN)}
    found |= {f"environment {name}": value for name, value in os.environ.items()}
    found["garbage collection"] = str((gc.isenabled(), gc.get_threshold()))
    found["switch interval, recursion"] = str((sys.getswitchinterval(), sys.getrecursionlimit()))
    found["import hooks"] = str((len(sys.meta_path), len(sys.path_hooks)))
    return found


_GETTERS = (
    "get_default_device",
    "get_default_dtype",
    "get_deterministic_debug_mode",
    "get_float32_matmul_precision",
    "get_num_interop_threads",
    "get_num_threads",
    "is_anomaly_enabled",
    "is_autocast_cache_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_warn_always_enabled",
)
_OF_CUDA = (
    "cudnn_sdp_enabled",
    "flash_sdp_enabled",
    "math_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "preferred_blas_library",
    "preferred_linalg_library",
)
_OF_PRODUCTS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_tf32",
    "fp32_precision",
)


def _told(ask: Callable[[], Any] | None) -> str:
    """What torch says; a version that lacks the question says nothing."""
    try:
        return "" if ask is None else str(ask())
    except (AttributeError, RuntimeError, TypeError) as error:
        return type(error).__name__


def _backends() -> Iterator[tuple[str, str]]:
    """The flags of ``torch.backends``, by name."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.backends."):
            continue
        for key in {*dir(module), *dir(type(module))}:
            try:
                value = None if key.startswith("_") else getattr(module, key)
            except (AttributeError, RuntimeError):
                continue  # a flag that this build does not have
            if isinstance(value, (bool, int, float, str)):
                yield f"{name}.{key}", str(value)
    cuda = torch.backends.cuda
    for key in _OF_CUDA:
        yield f"torch.backends.cuda.{key}()", _told(getattr(cuda, key, None))
    for key in _OF_PRODUCTS:
        yield f"torch.backends.cuda.matmul.{key}", _told(partial(getattr, cuda.matmul, key))


def _configurations() -> Iterator[tuple[str, str]]:
    """The entries of Inductor's and Dynamo's configuration, where these are loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and hasattr(type(module), "get_config_copy"):
            for key, value in module.get_config_copy().items():
                if isinstance(value, (bool, int, float, str, type(None))):
                    yield f"{name}.{key}", str(value)


def _shown(value: object) -> str:
    """A text that does not depend on addresses."""
    if isinstance(value, str):
        return value
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', '')}.{name}"
