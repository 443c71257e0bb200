"""Tensors of the CPU that pass for a GPU's, so that launches are remembered and calls are planned.

Triton's part of a launch is a stand-in: what it gives for a compiled kernel interprets the kernel
on the memory at the addresses that it is launched with. It raises an error where an argument is not
what the kernel was specialised for.
"""

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tinyllama.harness.kernels import launch_cache, plans
from tinyllama.harness.kernels.descriptors import is_descriptor
from tinyllama.ops import OPS

STREAM, FUNCTION, METADATA = 5, 7, (4, 1, 0)
_ONE = threading.Lock()  # Triton's interpreter is for one thread at a time


def traits(value: Any) -> Any:
    """What Triton specialises a kernel by, of one argument."""
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    elif isinstance(value, bool) or not isinstance(value, int):
        return type(value)
    return (value == 1, value % 16 == 0)


class Launcher:
    """As Triton's own, by its arguments."""

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel, self.args = kernel, args
        self.like = {
            i: (arg.dtype, _span(arg))
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor)
        }
        self.described = {
            i: (arg.base.dtype, _span(arg.base))
            for i, arg in enumerate(args)
            if is_descriptor(type(arg))
        }
        self.traits = [traits(arg) for arg in args]

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any
    ) -> None:
        assert (stream, function) == (STREAM, FUNCTION)
        assert args[:4] == (METADATA, None, None, None)
        self.interpret((gridX, gridY, gridZ), args[4:])

    def interpret(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert len(args) == len(self.traits)
        for i, value in enumerate(args):
            if i not in self.like and isinstance(value, float):
                continue  # kernels are not specialised by them
            name = self.kernel.arg_names[i]
            assert traits(value) == self.traits[i], f"{name} = {value}: compiled for another"
        read = [
            _at(value, *self.like[i]) if type(value) is int and i in self.like else value
            for i, value in enumerate(args)
        ]
        for i, of in self.described.items():
            # One that a plan makes holds an address in place of a tensor.
            read[i] = replace(args[i], base=_at(args[i].base.data_ptr(), *of))
        from tinyllama.harness.kernels import interpreter
        from tinyllama.harness.kernels.kernel_names import identity
        from tinyllama.harness.kernels.launch import arguments_of

        kernel = self.kernel
        # The interpreter copies tensors; a launch calls no torch.
        with _ONE, _disable_current_modes():
            interpreter.run(kernel, identity(kernel), grid, arguments_of(kernel, read, {}))


class Compiled:
    """Stands for a compiled kernel."""

    function, packed_metadata = FUNCTION, METADATA

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.run = Launcher(kernel, args)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.run.interpret(grid, args)


def _span(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _at(address: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _stream_of(index: int) -> int:
    return STREAM


class Posed:
    """What Triton was asked for, and the plans that were made."""

    def __init__(self) -> None:
        self.specialised: list[Compiled] = []
        self.plans: list[plans.Plan] = []


@pytest.fixture
def posed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Posed]:
    """Meanwhile every tensor is on GPU 0, which is the current one."""
    from triton.runtime.jit import JITFunction

    from tinyllama.harness.kernels.launch import Kernel

    stub = Posed()
    plan: Any = plans.planned
    ready: dict[int, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        named = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        bound_args = tuple(bound.arguments.values())
        stub.specialised.append(Compiled(self, bound_args))
        stub.specialised[-1].run.interpret((*grid, 1, 1)[:3], bound_args)
        return stub.specialised[-1]

    def planned(*args: Any) -> Any:
        results, plan_of_call = plan(*args)
        stub.plans.append(plan_of_call)
        return results, plan_of_call

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch_cache, "knows", lambda index: True)
    monkeypatch.setattr(launch_cache, "stream_of", lambda: _stream_of)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plans, "planned", planned)
    monkeypatch.setattr(Kernel, "_ready", property(lambda self: ready.setdefault(id(self), {})))
    _forget()
    yield stub
    _forget()


def _forget() -> None:
    """Nothing that was known of calls before is known in a test, nor after it."""
    for op in OPS.values():
        for provider in op.providers.values():
            if provider.derived is not None:
                provider.derived.calls.clear()
