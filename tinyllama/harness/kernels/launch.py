"""The one door to Triton: `jit`, and what a launch does on each device.

    from tinyllama.harness.kernels import jit, tl

    @jit
    def double(x, y, n, BLOCK: tl.constexpr): ...

    double[(programs,)](x, y, n, BLOCK=256, num_warps=4)

On a GPU a kernel is compiled and launched; on tensors of the CPU it is interpreted
(`tinyllama.harness.kernels.interpreter`). Inside `recorded` nothing runs: each launch is recorded
with its types, so that every kernel of a provider can be compiled for any chip, on a machine
without a GPU (tensors may then be on the ``meta`` device). Without triton a module with kernels
still imports, and a launch raises an error that says what to install.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tinyllama.harness.kernels.chips import CHOSEN, STATED
from tinyllama.harness.kernels.kernel_names import SHOWN, identity, shown_name
from tinyllama.harness.kernels.launch_cache import (
    AFFECTING,
    MOST_CACHED,
    Ready,
    among,
    launch_key,
    show,
)
from tinyllama.harness.machine.distribution import install

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Descriptors that the host makes: triton 3.4 and later have them.
HAS_DESCRIPTORS = (
    HAS_TRITON and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
)

if TYPE_CHECKING:
    tl: Any = None
    jit: Callable[[Callable[..., Any]], Any]
    begin: Any
    fetch: Any
    let_next_start: Any
    wait_for_last: Any

    class Kernel(Any):
        """Seen by a type checker, which knows no class of Triton's."""

    def arguments_of(kernel: Kernel, args: Any, kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError

elif HAS_TRITON:
    import triton.language as tl
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction
else:

    class _Language:
        """Stands for `triton.language`, so that modules with kernels can be imported."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    tl = _Language()


@dataclass(frozen=True)
class Launch:
    """One launch that was recorded: the kernel, its grid, and its arguments by name. tuned: the
    `tinyllama.harness.kernels.tuned.Tuned` that chose its configuration, if one did."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    tuned: Any = None

    @property
    def identity(self) -> str:
        """The kernel's name: ``op.function``."""
        return identity(self.kernel)


CHOOSING: list[Any] = []  # of `tinyllama.harness.kernels.tuned`: whose launch is being made
_RECORDS: list[list[Launch]] = []
_LAUNCHED: "list[list[Launched]]" = []


@dataclass(frozen=True)
class Launched:
    """One launch on a GPU: its grid, and Triton's compiled kernel, with its stages (``asm``),
    registers (``n_regs``) and spills (``n_spills``)."""

    kernel: Any
    grid: tuple[int, ...]


def launched() -> contextlib.AbstractContextManager[list[Launched]]:
    """Collect the launches on GPUs inside the block."""
    return among(_LAUNCHED, [])


@contextlib.contextmanager
def recorded(chip: str | None = None) -> Iterator[list[Launch]]:
    """Record launches instead of running them, with the configurations for ``chip`` (such as
    ``gfx942`` or ``sm_90``; None: the defaults, which hold for every chip)."""
    with among(_RECORDS, list[Launch]()) as launches, among(CHOSEN, chip or ""):
        yield launches


_HOOKED: list[Any] = []  # kernels that call someone before each launch
AFFECTING += [CHOOSING, _RECORDS, _LAUNCHED, _HOOKED]
_HERE = contextlib.nullcontext()


def device_of(arguments: Iterable[Any]) -> torch.device | None:
    """The device of the tensors among a launch's arguments; None if there is none.

    Raises ValueError for tensors of several devices: a kernel would read some of them over the
    bus, in no order with what writes them.
    """
    device = None
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            device = device or argument.device
            if argument.device != device:
                raise ValueError(
                    f"tensors on {device} and on {argument.device} in one launch: move them to one "
                    "device"
                )
    return device


def current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one: Triton launches on the current device's stream, wherever the
    tensors are."""
    if device is None or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def described(tensor: torch.Tensor, block: Sequence[int], *, to_tf32: bool = False) -> Any:
    """A tensor as a descriptor for kernels, whose loads take this block of it. to_tf32: they round
    float32 to tf32, only where `tinyllama.harness.kernels.tf32.descriptors_round`.

    Its rows must begin at multiples of 16 bytes (`triton.tools.tensor_descriptor`). On chips with a
    copy engine for tiles (sm_90 and later) such a load takes no registers.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor.from_tensor(tensor, list(block))
    if to_tf32:
        descriptor.round_f32_to_tf32 = True  # a field from triton 3.7 on
    return descriptor


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


if HAS_TRITON and not TYPE_CHECKING:

    class Kernel(JITFunction):
        """A jitted function that picks its way by where its tensors are. A launch like an earlier
        one is not specialised again."""

        interpretable = True
        source_type: Any = ASTSource  # what Triton compiles it from

        def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            if _RECORDS:
                _RECORDS[-1].append(_launch(self, grid, args, kwargs))
                return None
            plain_launch = not (warmup or callable(grid) or self.pre_run_hooks)
            key = launch_key(args, kwargs) if plain_launch else None
            if key is not None:
                if len(args) > self._first_constant:
                    # Real numbers, by which kernels are specialised where they are constants alone.
                    key += tuple(
                        repr(value)
                        for value, param in zip(args, self.params, strict=False)
                        if type(value) is float and param.is_constexpr
                    )
                return self._run_cached(key, args, tuple(grid), kwargs)
            show(None)
            device = device_of((*args, *kwargs.values()))
            if device is None or device.type == "cuda":
                with current(device):
                    kernel = super().run(*args, grid=grid, warmup=warmup, **STATED, **kwargs)
                if _LAUNCHED:
                    shape = grid(arguments_of(self, args, kwargs)) if callable(grid) else grid
                    for launches in _LAUNCHED:
                        launches.append(Launched(kernel, tuple(shape)))
                return kernel
            if device.type != "cpu":
                raise RuntimeError(f"{self.__name__} cannot run on {device.type} tensors")
            if not self.interpretable:
                raise RuntimeError(f"{self.__name__} is in Gluon, which runs on a GPU only")
            from tinyllama.harness.kernels import interpreter

            arguments = arguments_of(self, args, kwargs)
            shape = tuple(grid(arguments) if callable(grid) else grid)
            return interpreter.run(self, identity(self), shape, arguments)

        def add_pre_run_hook(self, hook: Callable[..., Any]) -> None:
            """Have a function called with the arguments of each launch, before it."""
            super().add_pre_run_hook(hook)
            _HOOKED.append(self)

        @functools.cached_property
        def _first_constant(self) -> int:
            """The place of the first parameter that a kernel is compiled for by its value."""
            places = [param.num for param in self.params if param.is_constexpr]
            return min(places, default=len(self.params))

        @functools.cached_property
        def _ready(self) -> dict[tuple[Any, ...], Ready]:
            """Compiled kernels of earlier launches."""
            return {}

        def _run_cached(self, key: Any, args: Any, grid: Any, kwargs: Any) -> Any:
            elsewhere = key[0] != torch.cuda.current_device()
            with torch.cuda.device(key[0]) if elsewhere else _HERE:
                ready = self._ready.get(key)
                if ready is None:
                    ready = self._specialised(key, args, grid, kwargs)
                    launch = ready.cached(key[0], grid, args, kwargs)
                else:
                    launch = ready.cached(key[0], grid, args, kwargs)
                    ready.launch(launch)
            for launches in _LAUNCHED:
                launches.append(Launched(ready.kernel, grid))
            show(launch)
            return ready.kernel

        def _specialised(self, key: Any, args: Any, grid: Any, kwargs: Any) -> Ready:
            """Launched by Triton, which compiles where it has to."""
            kernel = super().run(*args, grid=grid, warmup=False, **STATED, **kwargs)
            if len(self._ready) >= MOST_CACHED:
                self._ready.clear()
            rest = list(self.signature.parameters.values())[len(args) :]
            names = [(parameter.name, parameter.default) for parameter in rest]
            self._ready[key] = ready = Ready(kernel, names)
            return ready

    def jit(function: Callable[..., Any]) -> Kernel:
        """Make a kernel of a function (or of one that kernels call). Profilers show it by its
        file and function: ``rms_norm_backward``."""
        return kernel_of(function, Kernel)

    def kernel_of(function: Callable[..., Any], kind: type[Kernel], **options: Any) -> Kernel:
        """A kernel of this class, under the name that profilers are to show."""
        name = shown_name(function)
        SHOWN[name] = function
        return kind(function, repr=lambda specialization: name, **options)

    @jit
    def begin(PDL: tl.constexpr):
        """The first statement of a kernel that `dependent` launches: the kernel after it may start,
        and what the kernels before it write is waited for. Nothing may be read before."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

    @jit
    def fetch(addresses):
        """Bring what lies at these addresses into the L2 cache; nothing is read. Between
        `let_next_start` and `wait_for_last`, on chips that have these."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @jit
    def let_next_start(PDL: tl.constexpr):
        """The first half of `begin`."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()

    @jit
    def wait_for_last(PDL: tl.constexpr):
        """The second half of `begin`."""
        if PDL:
            tl.extra.cuda.gdc_wait()

    def _launch(kernel: Kernel, grid: Any, args: Any, kwargs: Any) -> Launch:
        named = arguments_of(kernel, args, kwargs)
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        shape = grid(named) if callable(grid) else grid
        return Launch(kernel, tuple(shape), named, options, CHOOSING[-1] if CHOOSING else None)

    def arguments_of(kernel: Kernel, args: Any, kwargs: Any) -> dict[str, Any]:
        """A kernel's arguments by name, defaults included."""
        named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **named)
        bound.apply_defaults()
        return dict(bound.arguments)

elif not TYPE_CHECKING:

    class Kernel:
        """Stands for a kernel, and can be named and told apart, but not launched."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError(f"{self.__name__} needs triton: {install('triton')}")

    def jit(function: Callable[..., Any]) -> Kernel:
        """Stands for a kernel where triton is not installed."""
        return Kernel(function)

    begin = fetch = let_next_start = wait_for_last = None
