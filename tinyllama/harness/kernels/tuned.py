"""Kernels under ``triton.autotune``, without a GPU that times them: each configuration by itself.

with tuned() as kernels:
    ...                                     # launches
for kernel in kernels.values():
    for config in kernel.configs:
        with kernel.forced(config): ...
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tinyllama.harness.kernels.kernel_names import identity
from tinyllama.harness.kernels.launch import CHOOSING, HAS_TRITON, current, device_of
from tinyllama.harness.kernels.launch_cache import AFFECTING, among

if HAS_TRITON:
    from triton.runtime.jit import KernelInterface
else:
    KernelInterface = object


class Tuned(NamedTuple):
    """A kernel under ``triton.autotune``, and the configurations that it chooses from in a launch:
    those that the author's own pruning leaves. chosen: of the launch that is made."""

    kernel: "AutoTuned"
    configs: list[Any]
    chosen: Any

    @property
    def identity(self) -> str:
        """The kernel's name: ``op.function``."""
        jitted: Any = self.kernel.fn
        while hasattr(jitted.fn, "fn"):  # under ``triton.heuristics``
            jitted = jitted.fn
        return identity(jitted)

    @contextlib.contextmanager
    def forced(self, config: Any, *, timed: bool = False) -> Iterator[None]:
        """Meanwhile, this configuration is used, and nothing is tuned. timed: each launch is
        made twice, as where a GPU times it first: what ``triton.autotune`` was told to set to 0 or
        to restore is so before the second one, all else is as the first one left it."""
        _FORCED[self.kernel] = config
        if timed:
            _TIMED.append(self.kernel)
        try:
            yield
        finally:
            del _FORCED[self.kernel]
            if timed:
                _TIMED.remove(self.kernel)


_FORCED: "dict[AutoTuned, Any]" = {}
_TIMED: "list[AutoTuned]" = []
_CHOICES: "list[dict[AutoTuned, Tuned]]" = []
AFFECTING += [_FORCED, _CHOICES]


def tuned() -> "contextlib.AbstractContextManager[dict[AutoTuned, Tuned]]":
    """Collect what ``triton.autotune`` chooses configurations for inside the block."""
    return among(_CHOICES, {})


def config_text(config: Any) -> str:
    """A configuration of Triton's: ``BLOCK=64, num_warps=8``."""
    return ", ".join(f"{name}={value}" for name, value in config.all_kwargs().items())


class AutoTuned(KernelInterface):
    """A kernel under ``triton.autotune``: tuned on a GPU; elsewhere, where nothing is timed, in
    the first of its configurations, or in the one that `Tuned.forced` says."""

    def __init__(
        self,
        kernel: Any,
        configs: Any,
        tuner: Callable[[Any], Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """options: of ``triton.autotune``, by name."""
        self.fn, self.arg_names, self.configs = kernel, kernel.arg_names, list(configs)
        self._tuner, self._options = functools.cache(lambda: tuner(kernel)), options
        self._prune = (options.get("prune_configs_by") or {}).get("early_config_prune")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of((*args, *kwargs.values()))
        configs = self._left(args, kwargs)
        config = _FORCED.get(self, configs[0])
        choice = Tuned(self, configs, config)
        for choices in _CHOICES:
            choices[self] = choice
        if device is not None and device.type == "cuda" and self not in _FORCED:
            with current(device):
                return self._tuner().run(*args, **kwargs)
        constants = config.all_kwargs()
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs, **constants}

        def launch() -> Any:
            if config.pre_hook:
                config.pre_hook(named)
            return self.fn.run(*args, **{**kwargs, **constants})

        CHOOSING.append(choice)
        try:
            if self in _TIMED:
                self._time(named, launch)
            return launch()
        finally:
            CHOOSING.pop()

    def _time(self, arguments: dict[str, Any], launch: Callable[[], Any]) -> None:
        """A launch as it is timed, with what surrounds it."""
        restored = {n: arguments[n].clone() for n in self._options.get("restore_value") or ()}
        before, after = self._options.get("pre_hook"), self._options.get("post_hook")

        def clear(only: bool) -> None:
            if before is not None:
                before(arguments, reset_only=only)
            else:
                for name in self._options.get("reset_to_zero") or ():
                    arguments[name].zero_()

        clear(False)
        launch()
        if after is not None:
            after(arguments, exception=None)
        else:
            for name, value in restored.items():
                arguments[name].copy_(value)
        clear(True)

    def _left(self, args: Any, kwargs: Any) -> list[Any]:
        """The configurations that the author's pruning leaves; all where it cannot be asked
        without a GPU."""
        if self._prune is None:
            return self.configs
        with contextlib.suppress(Exception):
            named = dict(zip(self.arg_names, args, strict=False))
            return list(self._prune(self.configs, named, **kwargs)) or self.configs
        return self.configs


@contextlib.contextmanager
def adopted() -> Iterator[None]:
    """Make what is imported meanwhile under ``triton.jit`` kernels of this package, which are
    interpreted on a CPU and compiled for any chip, and what is under ``triton.autotune`` an
    `AutoTuned`. Nothing is changed where triton is not installed, or where this holds already."""
    if not HAS_TRITON:
        yield
        return
    import triton

    from tinyllama.harness.kernels.launch import Kernel

    before, tune = triton.jit, triton.autotune
    if hasattr(tune, "of_triton"):
        yield
        return
    signature = inspect.signature(tune)

    def autotuned(configs: Any, *rest: Any, **named: Any) -> Callable[[Any], Any]:
        options = signature.bind(configs, *rest, **named).arguments
        return lambda kernel: AutoTuned(kernel, configs, tune(configs, *rest, **named), options)

    def adopt(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda function: Kernel(function, **options)
        return Kernel(function, **options)

    autotuned.of_triton = tune  # type: ignore[attr-defined]
    triton.jit, triton.autotune = adopt, autotuned
    try:
        yield
    finally:
        triton.jit, triton.autotune = before, tune
