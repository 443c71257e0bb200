"""Triton's interpreter made honest: bfloat16 as values, and kernels that also compile.

The interpreter runs a kernel's programs one after the other in numpy, on the CPU. Twelve things
in it are fixed here, once, so that no kernel branches on it and no tolerance widens for it:

* it holds bfloat16 as bit patterns, on which sums and products work as on integers, and stores
  float32 as bfloat16 by truncation; here a bfloat16 is a float32 rounded to nearest, ties to even;
* it needs ``TRITON_INTERPRET`` before triton is imported, and then nothing compiles; here a
  kernel is interpreted when its tensors are on the CPU, in the same process that compiles it;
* numpy's BLAS adds up a product in an order that depends on where an element stands, so that a
  score made again as k q differs from q k; here the sum inside a product is one in float64, rounded
  once, wherever it stands;
* it adds up a scan one element after the other, which loses digits that a device's tree of sums
  keeps; here it is such a tree;
* it warns of the maximum of NaN alone, and raises an error for its place;
* what it makes for itself lies on torch's default device; here on the CPU, as the tensors do;
* it gives the result of a comparison the type of what was compared, so that a mask made of a block
  and a scalar, or of bfloat16, is refused; here it has the type int1, as in a compiled kernel;
* it leaves a floating-point argument a Python number; here it is a float32 scalar, as compiled;
* it passes over libdevice, whose functions return None; here the common ones are computed, and the
  others raise an error that names them;
* it does not verify what a kernel promises its compiler; here a false promise raises an error
  (`tinyllama.harness.kernels.compiler_hints`);
* numpy warns of an overflow, even in elements that a mask leaves out; here, as on a
  GPU, the result is infinite without a warning;
* up to triton 3.3 it leaves the language patched behind it; here all is put back.

What it cannot show stays so: products are never tf32 and add up without loss. Programs run in turn,
or as `tinyllama.harness.kernels.programs` orders. A store out of bounds may end the process, unless
accesses are watched (`tinyllama.harness.kernels.bounds`); an endless loop is ended in `limited`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from tinyllama.harness.kernels import (
    interpreter_reductions,  # noqa: F401 (replaces methods of the interpreter)
    interpreter_speed,
    language,
    libdevice,
    programs,
)
from tinyllama.harness.kernels.interpreter_values import RUNNING, Running
from tinyllama.harness.kernels.launch_cache import among

STEPS = 500_000  # operations of one program, of some microseconds each, after which it is ended


class EndlessLoopError(AssertionError):
    """A program that takes more operations than `limited` allows."""


def run(kernel: Any, name: str, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Run a kernel's Python function for every program of a grid, on tensors of the CPU; what it
    raises is the cause of Triton's InterpreterError. name: ``op.function``."""
    function = kernel.fn
    programs.fitting(grid, name)
    with (
        among(RUNNING, Running(function, name, arguments)),
        language.interpreted(),
        _device_functions(function),
        np.errstate(all="ignore"),
        _on_the_cpu(),
    ):
        constants = {param.name for param in kernel.params if param.is_constexpr}
        values = {
            name: value if name in constants else stock._implicit_cvt(value)
            for name, value in arguments.items()
        }
        call = functools.partial(_rewritten(function), **values)
        try:
            programs.run(call, name, grid, stock.interpreter_builder)
        except Exception as error:
            raise stock.InterpreterError(repr(error)) from error


def _on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """What is made in the context lies there; one that changes nothing is quicker."""
    elsewhere = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if elsewhere else contextlib.nullcontext()


def running() -> tuple[Running, tuple[int, ...]]:
    """The launch that is interpreted, an object of its own for each, and its current program."""
    return RUNNING[-1], tuple(stock.interpreter_builder.grid_idx)


class _StepCount:
    """Counts the operations of the program that runs."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self.program: Any = None

    def __call__(self) -> None:
        program = getattr(stock.interpreter_builder, "grid_idx", ())  # none before the first launch
        if program is not self.program:
            self.program, self.taken = program, 0
        self.taken += 1
        if self.taken > self.limit:
            self.taken = 0
            kernel = RUNNING[-1].kernel if RUNNING else "a kernel"
            raise EndlessLoopError(
                f"{kernel}, program {tuple(program)}: more than {self.limit:,} operations: "
                "an endless loop?"
            )


@contextlib.contextmanager
def limited(steps: int = STEPS) -> Iterator[None]:
    """Meanwhile, a program that takes more operations raises EndlessLoopError."""
    counts, interpreter_speed.COUNTS[:] = [*interpreter_speed.COUNTS], [_StepCount(steps)]
    try:
        yield
    finally:
        interpreter_speed.COUNTS[:] = counts


@functools.cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    rewritten: Callable[..., Any] = stock.InterpretedFunction(function).rewrite()
    return rewritten


@contextlib.contextmanager
def _device_functions(kernel: Callable[..., Any]) -> Iterator[None]:
    """Functions under ``jit``, those of triton's own library too, can be called meanwhile, and so
    can what the modules of these functions have names for (`libdevice.names_of`)."""
    before = JITFunction.__call__
    changed: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # modules' names, and before

    def prepare(names: dict[str, Any]) -> None:
        meanwhile = libdevice.names_of(names)
        if "range" not in names:
            names["range"] = range
            meanwhile["range"] = functools.partial(language.counted, range)
        changed[id(names)] = names, {name: names[name] for name in meanwhile}
        names.update(meanwhile)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in changed:
            prepare(self.fn.__globals__)
        return _rewritten(self.fn)(*args, **kwargs)

    prepare(kernel.__globals__)
    JITFunction.__call__ = call
    try:
        yield
    finally:
        JITFunction.__call__ = before
        for names, members in changed.values():
            names.update(members)
            if names["range"] is range:
                del names["range"]


interpreter_speed.share_types()
# What a check of overflows computes is read where asserts are on (``debug``), and it is a sixth of
# the time.
stock.interpreter_builder.options = replace(
    stock.interpreter_builder.options, sanitize_overflow=False
)
