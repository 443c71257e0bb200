"""Triton kernels on tensors of the CPU, wherever and whenever they were decorated."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.launch import HAS_TRITON, Kernel, device_of
from tinyllama.harness.kernels.tuned import AutoTuned

ASKED = (  # of torch.cuda, where there is no GPU: answered by `foreign`
    "get_device_properties",
    "get_device_capability",
    "get_device_name",
    "current_device",
    "current_stream",
    "synchronize",
)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Meanwhile, launches on tensors of the CPU are interpreted, and questions about a GPU that is
    not there are answered.

    A kernel under ``triton.autotune`` has its first configuration.
    """
    if not HAS_TRITON:
        yield
        return
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, KernelInterface

    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_before(torch.cuda, *ASKED))
        stack.enter_context(_as_before(torch.cuda.device, "__init__"))
        stack.enter_context(_as_before(driver, "_active", "_default"))
        stack.enter_context(foreign())
        for kind in (JITFunction, InterpretedFunction, Autotuner):
            stack.enter_context(_as_before(kind, "run", "__getitem__"))
        _interpret(JITFunction, _kernel_of)
        _interpret(InterpretedFunction, _kernel_of)
        InterpretedFunction.__getitem__ = KernelInterface.__getitem__  # triton 3.3 has its own
        _interpret(Autotuner, _first_configuration)
        yield


@contextlib.contextmanager
def _as_before(owner: Any, *names: str) -> Iterator[None]:
    """Afterwards, these members of a module, class or object are what they were."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


def _interpret(kind: Any, adopt: Callable[[Any], Any]) -> None:
    """Launch by what ``adopt`` makes of a kernel of this kind, where its tensors are on the CPU."""
    usual = kind.run

    @functools.wraps(usual)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = device_of((*args, *kwargs.values()))
        if device is None or device.type != "cpu":
            return usual(self, *args, **kwargs)
        return adopt(self).run(*args, **kwargs)

    kind.run = run


def _kernel_of(kernel: Any) -> Kernel:
    return _kernel(kernel.fn)  # whose hash is not that of its source


_kernel = functools.cache(Kernel)


@functools.cache
def _first_configuration(kernel: Any) -> AutoTuned:
    pruning = {"early_config_prune": getattr(kernel, "early_config_prune", None)}
    return AutoTuned(kernel.fn, kernel.configs, lambda _: kernel, {"prune_configs_by": pruning})
