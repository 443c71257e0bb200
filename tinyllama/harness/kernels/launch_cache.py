"""Launches like earlier ones: which compiled kernel they take, found without Triton's help.

A launch by `tinyllama.harness.kernels.launch` is specialised by Triton once. One with the same
types, whole numbers, alignments, constants and options on the same GPU takes the same compiled
kernel, and goes straight to its launcher.
"""

import contextlib
import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack as dispatch_modes

from tinyllama.harness.kernels.descriptors import form, is_descriptor

T = TypeVar("T")

AFFECTING: list[Sized] = []  # collections in which something is while launches are affected
MOST_CACHED = 4096  # launches of one kernel that are remembered


class CachedLaunch(NamedTuple):
    """A launch of a compiled kernel: its arguments in the order of the signature, and the GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    gpu: int


@contextlib.contextmanager
def among(several: list[Any], value: T) -> Iterator[T]:
    """Meanwhile, a value is the last of several."""
    several.append(value)
    try:
        yield value
    finally:
        several.pop()


# -- who watches ------------------------------------------------------------------------------


def _hooks() -> Callable[[], tuple[Any, Any]]:
    """What returns Triton's hooks around launches."""
    if importlib.util.find_spec("triton.knobs") is not None:
        from triton import knobs

        runtime = knobs.runtime
        return lambda: (runtime.launch_enter_hook, runtime.launch_exit_hook)
    from triton.compiler import CompiledKernel

    return lambda: (CompiledKernel.launch_enter_hook, CompiledKernel.launch_exit_hook)


hooks: Callable[[], tuple[Any, Any]] = lambda: (None, None)  # noqa: E731
if importlib.util.find_spec("triton") is not None:
    hooks = _hooks()


def hooked() -> bool:
    """Whether Triton is to call someone at launches: a profiler."""
    enter, leave = hooks()
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def disturbed() -> bool:
    """Whether someone watches or changes launches or torch's calls, or follows the code (a
    debugger), so that each call has to be made as it is written."""
    return bool(any(AFFECTING) or dispatch_modes() or sys.gettrace()) or hooked()


def as_written() -> contextlib.AbstractContextManager[Sized]:
    """Meanwhile no plan is used (`tinyllama.harness.kernels.plans`): to debug a provider, or to
    compare."""
    return among(AFFECTING, [None])


_TRACES = threading.local()


@contextlib.contextmanager
def traced(see: Callable[[CachedLaunch | None], None]) -> Iterator[None]:
    """Show each launch that this thread makes on a GPU; None stands for one that Triton
    specialises every time."""
    before = getattr(_TRACES, "see", None)
    _TRACES.see = see
    try:
        yield
    finally:
        _TRACES.see = before


def show(launch: CachedLaunch | None) -> None:
    """A launch was made."""
    see = getattr(_TRACES, "see", None)
    if see is not None:
        see(launch)


# -- the key ----------------------------------------------------------------------------------

_Types = tuple[type, ...]
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MEMORY = (torch.Tensor, tuple, list, dict, set)  # by name: a key would keep what is in them alive


class _Places(NamedTuple):
    """Where the arguments of a launch are by which a kernel is specialised."""

    tensors: list[int]
    descriptors: list[int]
    values: list[int]


@functools.cache
def _places(types: _Types, named: _Types) -> _Places | None:
    """The places, by the types of the arguments; None where another type is among them."""
    tensors = [i for i, kind in enumerate(types) if kind in _TENSORS]
    descriptors = [i for i, kind in enumerate(types) if is_descriptor(kind)]
    values = [i for i, kind in enumerate(types) if kind in (int, bool)]
    distinguished = {*_TENSORS, int, bool, float, type(None), *(types[i] for i in descriptors)}
    memory = any(issubclass(kind, _MEMORY) or is_descriptor(kind) for kind in named)
    if not (tensors or descriptors) or {*types} - distinguished or memory:
        return None
    return _Places(tensors, descriptors, values)


@functools.cache
def knows(index: int) -> bool:
    """Whether what a kernel is specialised by on this GPU is what `launch_key` holds. On AMD's GPUs
    it is not: launches there are Triton's own, and nothing is planned."""
    from triton.compiler import make_backend
    from triton.runtime import driver

    with torch.cuda.device(index):
        return specialises_by_address(type(make_backend(driver.active.get_current_target())))


def specialises_by_address(backend: Any) -> bool:
    """Whether a backend of Triton asks for nothing of a tensor but its dtype and whether its
    address is a multiple of 16."""
    from triton.backends.compiler import BaseBackend

    base: Any = BaseBackend
    for name in ("get_tensor_specialization", "get_arg_specialization"):
        if hasattr(base, name):
            return getattr(backend, name) is getattr(base, name)
    return False


def launch_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that decides which compiled kernel a launch on a GPU takes: types and dtypes, whether
    addresses are multiples of 16, the forms of descriptors, whole numbers, constants and options.
    None where a launch has something else, or is not on one GPU: Triton then decides."""
    types, named = tuple(map(type, args)), tuple(map(type, kwargs.values()))
    places = _places(types, named)
    if places is None:
        return None
    described = [args[i] for i in places.descriptors]
    if any(type(descriptor.base) not in _TENSORS for descriptor in described):
        return None
    tensors = [*(args[i] for i in places.tensors), *(x.base for x in described)]
    index = tensors[0].get_device()
    if index < 0 or not knows(index):
        return None
    traits: list[Any] = [form(descriptor) for descriptor in described]
    for tensor in tensors:
        if tensor.get_device() != index:
            return None
        traits += (tensor.dtype, tensor.data_ptr() % 16)
    values = [args[i] for i in places.values]
    return (index, types, named, *traits, *values, *kwargs, *kwargs.values())


# -- the launch -------------------------------------------------------------------------------

_HEAD = ["gridX", "gridY", "gridZ", "stream", "function"]
_HOOKS = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]


@functools.cache
def _takes_stream(launcher: Any) -> bool:
    parameters = list(inspect.signature(launcher.__call__).parameters)[1:]
    return parameters in ([*_HEAD, "args"], [*_HEAD, *_HOOKS, "args"])


def takes_stream(kernel: Any) -> bool:
    """Whether the launcher of a compiled kernel takes the grid, a stream, the function, its
    metadata, those of the launch, the hooks, and the arguments: as in triton 3.3 to 3.9. Any
    other is launched by ``kernel[grid](*arguments)``, which costs some microseconds more."""
    launcher: Any = type(kernel.run)
    return _takes_stream(launcher)


@functools.cache
def stream_of() -> Callable[[int], int]:
    """Triton's function from a GPU's index to its current stream."""
    from triton.runtime import driver

    of: Callable[[int], int] = driver.active.get_current_stream
    return of


class Ready:
    """A compiled kernel. rest: names and defaults of parameters that a launch gives by name."""

    def __init__(self, kernel: Any, rest: list[tuple[str, Any]]) -> None:
        self.kernel, self.rest, self._direct = kernel, rest, takes_stream(kernel)

    def cached(
        self, gpu: int, grid: tuple[int, ...], args: Any, named: dict[str, Any]
    ) -> CachedLaunch:
        """A launch of it with these arguments."""
        rest = [named.get(name, default) for name, default in self.rest]
        return CachedLaunch(self.kernel, grid, (*args, *rest), gpu)

    def launch(self, launch: CachedLaunch) -> None:
        """Launch on the current stream of the current GPU, the one of the tensors."""
        kernel, (x, y, z) = self.kernel, (*launch.grid, 1, 1)[:3]
        if self._direct and not hooked():
            head = (stream_of()(launch.gpu), kernel.function, kernel.packed_metadata)
            kernel.run(x, y, z, *head, None, None, None, *launch.arguments)
        else:
            kernel[x, y, z](*launch.arguments)
