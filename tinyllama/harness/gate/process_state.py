"""What of a process an import may change for everyone: functions and classes of torch, Triton, the
harness and Python, torch's settings, the environment, and what slows a process down (`process`).

before = code(), settings()
...                                     # an import
before[0].changes()                     # name -> what it became, as a text
changes(before[1], settings())
"""

import gc
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from tinyllama.harness import __name__ as HARNESS

# Modules whose functions and classes are compared, with all that is inside them.
_WATCHED = ("torch", "triton", "numpy", HARNESS)
_BELOW = tuple(f"{name}." for name in _WATCHED)
_ATEN = ("aten", "prims")  # namespaces of torch's own operators
GONE = "removed"
GENERATOR = "state of the random generator"
THREADS = "threads of Python"
AT_IMPORT = (GENERATOR, THREADS)  # what a call may change

Snapshot = dict[str, Any]


class Inside(NamedTuple):
    """What a function runs. It can be replaced while the function is the same object."""

    code: types.CodeType
    defaults: tuple[Any, ...] | None
    keywords: tuple[tuple[str, int], ...]  # with the addresses of their values


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """What was there before and is another now. What is only added changes nothing that exists,
    except in the environment and among torch's own operators."""
    found = {}
    for name, value in before.items():
        now = after.get(name, GONE)
        if value is now:
            continue
        same = _same_inside(value, now) if isinstance(value, Inside) else value is now
        same = value == now if isinstance(value, str) else same
        if not same:
            found[name] = _shown(now)
    added = [n for n in after if n not in before and n.startswith(("environment ", "operator "))]
    return found | {name: _shown(after[name]) for name in added}


def _same_inside(one: Inside, other: object) -> bool:
    return (
        isinstance(other, Inside)
        and (one.code is other.code and one.defaults is other.defaults)
        and one.keywords == other.keywords
    )


def loaded() -> set[str]:
    """The modules of torch, Triton and the rest that this process has loaded. Some of torch's
    change others when they are loaded first, which is no change of whoever needed them."""
    return {name for name in sys.modules if _watched(name)}


def _watched(name: str) -> bool:
    return name in _WATCHED or name.startswith(_BELOW)


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


class Code(Snapshot):
    """Functions, classes and modules by name, and where each of them is found."""

    def __init__(self) -> None:
        super().__init__()
        self._places: list[tuple[str, Mapping[str, Any], str, Any, Inside | None]] = []

    def note(self, name: str, space: Mapping[str, Any], key: str, value: Any) -> None:
        """``space``: has the value under the key, and is asked again."""
        self[name], inside = value, None
        if type(value) is types.FunctionType:
            self[f"{name}, inside"] = inside = _inside(value)
        self._places.append((name, space, key, value, inside))

    def changes(self) -> dict[str, str]:
        """What is another now, as of `changes`, without a list of all that is there."""
        found: dict[str, str] = {}
        for name, space, key, value, inside in self._places:
            now = space.get(key, GONE)
            if now is not value:
                found |= changes(self._of(name), _function(name, now) if _told_of(now) else {})
            elif inside is not None and (
                value.__code__ is not inside.code
                or value.__defaults__ is not inside.defaults
                or _keywords(value) != inside.keywords
            ):
                found |= changes(self._of(name), _function(name, value))
        return found

    def added(self, is_of_tree: Callable[[str], bool]) -> dict[str, str]:
        """The functions of a tree that were put into one of these modules or classes, where calls
        of all ops may find them. is_of_tree: whether a file is of the tree."""
        spaces = {
            id(space): (name.removesuffix(f".{key}"), space)
            for name, space, key, *_ in self._places
        }
        added: dict[str, str] = {}
        for of, space in spaces.values():
            for key, value in list(space.items()):
                name, code = f"{of}.{key}", _code_of(value)
                if code is not None and name not in self and is_of_tree(code.co_filename):
                    added[name] = code.co_name
        return added

    def _of(self, name: str) -> Snapshot:
        return {one: self[one] for one in (name, f"{name}, inside") if one in self}


def code() -> Code:
    """Of torch, Triton, the harness and Python."""
    collects = gc.isenabled()
    gc.disable()  # thousands of objects are made, and stay
    try:
        return _code()
    finally:
        if collects:
            gc.enable()


def _code() -> Code:
    found = Code()
    watched: dict[str, bool] = {}  # by the module that a class says it is of
    classes: set[int] = set()  # most are seen in many modules
    for name, module in list(sys.modules.items()):
        if not (_watched(name) or _standard(name)) or not isinstance(module, types.ModuleType):
            continue
        found.note(f"module {name}", sys.modules, name, module)

        def whole(of: str, name: str = name) -> bool:
            if of not in watched:
                watched[of] = _watched(of)
            return watched[of] or of == name

        note_module(found, name, module, classes, whole)
    return found


def note_module(
    found: Code,
    name: str,
    module: types.ModuleType,
    classes: set[int],
    whole: Callable[[str], bool],
) -> None:
    """Note what a module can run. whole: whether the members of a class are noted too, by the
    module that it says it is of; once, and then it is one of ``classes``."""
    space = vars(module)
    for key, value in list(space.items()):
        if not _runs(value):
            continue
        found.note(f"{name}.{key}", space, key, value)
        if (
            issubclass(type(value), type)
            and id(value) not in classes
            and whole(value.__module__ or "")
        ):
            classes.add(id(value))
            _note_members(found, value)


def of_others(name: str, module: types.ModuleType) -> bool:
    """Whether a module is one of those that `code` notes, or is installed beside them."""
    file = getattr(module, "__file__", None)
    return _watched(name) or _standard(name) or not file or "-packages/" in file


def _told_of(value: object) -> bool:
    return _runs(value) or _describes(value)


def _runs(value: object) -> bool:
    """A class, or something that can be called. Some deprecated objects warn when asked."""
    return issubclass(type(value), type) or callable(value)


def _inside(function: types.FunctionType) -> Inside:
    return Inside(function.__code__, function.__defaults__, _keywords(function))


def _keywords(function: types.FunctionType) -> tuple[tuple[str, int], ...]:
    given = function.__kwdefaults__
    return tuple((key, id(one)) for key, one in given.items()) if given else ()


def _function(name: str, value: Any) -> Snapshot:
    """A function, and what it runs."""
    if not isinstance(value, types.FunctionType):
        return {name: value}
    return {name: value, f"{name}, inside": _inside(value)}


def _note_members(found: Code, kind: type) -> None:
    """The methods and properties of a class."""
    where = f"{kind.__module__}.{kind.__qualname__}"
    space = vars(kind)
    for key, value in list(space.items()):
        if callable(value) or _describes(value):
            found.note(f"{where}.{key}", space, key, value)


def _describes(value: object) -> bool:
    return isinstance(value, (property, staticmethod, classmethod))


def _code_of(value: Any) -> types.CodeType | None:
    """Of a function, a method or a property. Deprecated objects warn where `isinstance` asks."""
    if issubclass(type(value), (staticmethod, classmethod)):
        value = value.__func__
    elif issubclass(type(value), property):
        value = value.fget
    return value.__code__ if type(value) is types.FunctionType else None


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
    keys = ("_dispatch_tls_local_exclude_set", "_dispatch_tls_local_include_set")
    found |= {name: _told(getattr(torch._C, name, None)) for name in keys}
    found["folder"] = os.getcwd()
    found |= dict(_constants())
    found |= dict(_backends())
    found |= dict(_configurations())
    overridden = getattr(torch.library, "_impls", ())
    found |= {f"operator {name}": "replaced" for name in overridden if name.startswith(_ATEN)}
    found |= {f"environment {name}": value for name, value in os.environ.items()}
    return found | process() | dict(_hooks())


def _constants() -> Iterator[tuple[str, str]]:
    """The constants of the harness: numbers, texts, and containers of these. What is empty is a
    cache, which may be filled."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{HARNESS}."):
            for key, value in list(vars(module).items()):
                if key.isupper() and _is_constant(value):
                    yield f"{name}.{key}", _plain(value)


def _is_constant(value: object) -> bool:
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        inside = (*value, *value.values()) if isinstance(value, dict) else value
        return bool(value) and all(map(_is_constant, inside))
    return isinstance(value, (bool, int, float, str, torch.dtype))


def process() -> dict[str, str]:
    """What makes a process slower or otherwise different, as texts."""
    return {
        "garbage collection": str(
            (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug())
        ),
        "calls of the garbage collector": str(len(gc.callbacks)),
        "switch interval, recursion": str((sys.getswitchinterval(), sys.getrecursionlimit())),
        "import hooks": ", ".join(map(_shown, (*sys.meta_path, *sys.path_hooks))),
        "tracing": str((sys.gettrace() is None, threading.gettrace() is None, _monitors())),
        "profiling": str((sys.getprofile() is None, threading.getprofile() is None)),
        "traced memory": str(tracemalloc.is_tracing()),
        THREADS: str(len(threading.enumerate())),
        "processors": str(sorted(os.sched_getaffinity(0))),
        "priority": str((os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))),
        "signals": str([(one, _shown(signal.getsignal(one))) for one in signal.valid_signals()]),
        "timers": str([signal.getitimer(one)[1] for one in range(3)]),
        "limits": str([resource.getrlimit(one) for one in _LIMITS]),
        "errors of numpy": str((numpy.geterr(), numpy.getbufsize())),
    }


_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


def _monitors() -> list[str | None]:
    """The tools that observe this process, from Python 3.12 on."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]


def _hooks() -> Iterator[tuple[str, str]]:
    """What torch calls around a call, or runs in the place of something."""
    for key, value in vars(torch.nn.modules.module).items():
        if key.startswith("_global_") and isinstance(value, (dict, bool)):
            told = value if isinstance(value, bool) else len(value)
            yield f"torch.nn.modules.module.{key}", str(told)
    saved = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = _told(None if saved is None else lambda: saved(False) is None)
    yield "hooks of saved tensors", hooks
    yield "the profiler", _told(getattr(torch.autograd, "_profiler_enabled", None))
    filled: Any = torch.utils.deterministic
    yield "what fills memory", _told(lambda: filled.fill_uninitialized_memory)
    table = sys.modules.get("torch._decomp")
    yield "decompositions", "" if table is None else str(len(table.decomposition_table))
    frames = sys.modules.get("torch._dynamo.eval_frame")
    yield "stance of the compiler", str(getattr(getattr(frames, "_stance", None), "stance", ""))


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
                if isinstance(value, (bool, int, float, str, type(None), list, dict, tuple, set)):
                    yield f"{name}.{key}", _plain(value)


def _plain(value: object) -> str:
    """A text of plain values; of others, what they are."""
    if not isinstance(value, (list, dict, tuple, set)):
        return str(value)
    try:
        return json.dumps(sorted(map(str, value)) if isinstance(value, set) else value)
    except (TypeError, ValueError):
        return type(value).__name__


def _shown(value: object) -> str:
    """A text that does not depend on addresses."""
    if isinstance(value, str):
        return value
    if isinstance(value, Inside):
        return value.code.co_name
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', '')}.{name}"
