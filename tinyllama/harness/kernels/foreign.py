"""Kernels of other projects on a machine without a GPU.

    with foreign():
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

Such code asks for a GPU's properties when it is imported and when it is called, even if its tensors
are on the CPU. `foreign` answers what would raise an error otherwise, and nothing else: a question
about a GPU that is there is still answered by torch and Triton. Kernels under ``triton.jit`` are
adopted, as in every file that ``tinyllama check`` loads.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._triton import has_triton

from tinyllama.harness.kernels.chips import processors_of
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.kernels.tuned import adopted

CPU = torch.device("cpu")
Names = Mapping[str, Mapping[str, Any]]


@contextlib.contextmanager
def foreign(*, hollow: Iterable[str] = (), instead: Names | None = None) -> Iterator[None]:
    """Meanwhile, modules of another project are imported; later they can be called on a CPU.

    hollow: packages of which only modules are wanted: their ``__init__`` is not run. A package
        comes before the packages inside it.
    instead: for the names of modules that are not to be imported, what others import from them.
        Any other name in such a module is a function that raises NotImplementedError.

    Raises ModuleNotFoundError for a hollow package that is not installed.
    """
    _answer()
    for name in hollow:
        _hollow(name)
    for name, members in (instead or {}).items():
        _stand_in(name, members)
    with adopted():
        yield


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Meanwhile, this process sees no GPU: code that asks for one does as on a machine without it.

    Enter `foreign` inside. Nothing else may use a GPU meanwhile.
    """
    before = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
    active = _driver_replaced() if HAS_TRITON else None
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = before
        has_triton.cache_clear()  # torch.compile may have asked, and would find no GPU ever after
        if HAS_TRITON:
            _restore_driver(active)


def _hollow(name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"no package {name!r}: install it", name=name)
    _register(name, importlib.util.module_from_spec(spec))


def _stand_in(name: str, members: Mapping[str, Any]) -> None:
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        _stand_in(parent, {})
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(members, __getattr__=functools.partial(_missing, name))
    _register(name, module)


def _missing(module: str, name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} is not imported: `foreign` stands for {module}")

    return missing


def _register(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


# -- what is asked of a GPU -------------------------------------------------------------------


def _answer() -> None:
    """Answer questions about a GPU where there is none, for the rest of the process."""
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *_: SimpleNamespace(
            name="cpu", multi_processor_count=processors_of(CPU), major=0, minor=0, warp_size=32
        ),
        "get_device_capability": lambda *_: (0, 0),
        "get_device_name": lambda *_: "cpu",
        "current_device": lambda: 0,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
        "synchronize": lambda *_: None,
    }
    for name, answer in answers.items():
        _replace(torch.cuda, name, answer)
    _replace(torch.cuda.device, "__init__", _make_none_current)
    if HAS_TRITON:
        _name_a_target()


def _make_none_current(context: Any, device: Any) -> None:
    """``__init__`` of `torch.cuda.device`, for a CPU."""
    context.idx = context.prev_idx = -1


def _replace(owner: Any, name: str, answer: Callable[..., Any]) -> None:
    """Let a function of torch's give this answer where its last argument is a CPU, or where it is
    asked about the current GPU and there is none."""
    original = getattr(owner, name)
    if hasattr(original, "answer"):
        return

    @functools.wraps(original)
    def answered(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device", args[-1] if args else None)
        if _of_cpu(device):
            return answer(*args, *kwargs.values())
        return original(*args, **kwargs)

    answered.answer = answer  # type: ignore[attr-defined]
    setattr(owner, name, answered)


def _of_cpu(device: Any) -> bool:
    """Whether a question is about a CPU: its device is one, or there is no GPU."""
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu":
        return True
    return not torch.cuda.is_available()


def _name_a_target() -> None:
    """Let Triton's active driver name a target that is no GPU, if there is none."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except RuntimeError:
        _driver_replaced()


def _driver_replaced() -> Any:
    """Triton's active driver, None where it has none; one for the CPU takes its place."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active = None
    with contextlib.suppress(RuntimeError):
        active = driver.active
    target = GPUTarget("cpu", 0, 32)
    facts = {"multiprocessor_count": processors_of(CPU), "max_shared_mem": 65536, "warpSize": 32}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_active_torch_device=lambda: CPU,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: facts),
        )
    )
    return active


def _restore_driver(active: Any) -> None:
    from triton.runtime import driver

    if active is not None:
        driver.set_active(active)
    else:
        with contextlib.suppress(RuntimeError):  # there is none to become active
            driver.reset_active()
