"""Kernels under ``triton.autotune``, without a GPU that times them: each configuration by itself.

with tuned() as found:
    ...                                     # launches
for one in found.values():
    for config in one.configs:
        with one.forced(config): ...
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tinyllama.harness.kernels.known import AFFECTING, among
from tinyllama.harness.kernels.launch import CHOOSING, HAS_TRITON, current, device_of, identity

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
    def forced(self, config: Any) -> Iterator[None]:
        """Meanwhile, this configuration is used, and nothing is tuned."""
        _FORCED[self.kernel] = config
        try:
            yield
        finally:
            del _FORCED[self.kernel]


_FORCED: "dict[AutoTuned, Any]" = {}
_SEEN: "list[dict[AutoTuned, Tuned]]" = []
AFFECTING += [_FORCED, _SEEN]


def tuned() -> "contextlib.AbstractContextManager[dict[AutoTuned, Tuned]]":
    """Collect what ``triton.autotune`` chooses configurations for inside the block."""
    return among(_SEEN, {})


def config_text(config: Any) -> str:
    """A configuration of Triton's: ``BLOCK=64, num_warps=8``."""
    return ", ".join(f"{name}={value}" for name, value in config.all_kwargs().items())


class AutoTuned(KernelInterface):
    """A kernel under ``triton.autotune``: tuned on a GPU; elsewhere, where nothing is timed, in
    the first of its configurations, or in the one that `Tuned.forced` says."""

    def __init__(
        self, kernel: Any, configs: Any, tuner: Callable[[Any], Any], prune: Any = None
    ) -> None:
        self.fn, self.arg_names, self.configs = kernel, kernel.arg_names, list(configs)
        self._tuner, self._prune = functools.cache(lambda: tuner(kernel)), prune

    def run(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of((*args, *kwargs.values()))
        configs = self._left(args, kwargs)
        config = _FORCED.get(self, configs[0])
        choice = Tuned(self, configs, config)
        for seen in _SEEN:
            seen[self] = choice
        if device is not None and device.type == "cuda" and self not in _FORCED:
            with current(device):
                return self._tuner().run(*args, **kwargs)
        constants = config.all_kwargs()
        if config.pre_hook:
            config.pre_hook(
                {**dict(zip(self.arg_names, args, strict=False)), **kwargs, **constants}
            )
        CHOOSING.append(choice)
        try:
            return self.fn.run(*args, **{**kwargs, **constants})
        finally:
            CHOOSING.pop()

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
    `AutoTuned`. Nothing is changed where triton is not installed."""
    if not HAS_TRITON:
        yield
        return
    import triton

    from tinyllama.harness.kernels.launch import Kernel

    before, tune = triton.jit, triton.autotune

    def autotuned(configs: Any, *rest: Any, **named: Any) -> Callable[[Any], Any]:
        prune = (named.get("prune_configs_by") or {}).get("early_config_prune")
        return lambda kernel: AutoTuned(kernel, configs, tune(configs, *rest, **named), prune)

    def made(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda function: Kernel(function, **options)
        return Kernel(function, **options)

    triton.jit, triton.autotune = made, autotuned
    try:
        yield
    finally:
        triton.jit, triton.autotune = before, tune
