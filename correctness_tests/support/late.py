"""What interpreted kernels round to bfloat16 on the way to a result, launch by launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tinyllama.harness.kernels import interpreter, interpreter_values


@contextlib.contextmanager
def _rounded_late() -> Iterator[None]:
    """Meanwhile a value is rounded to bfloat16 where it is stored or is an operand of a product,
    and nowhere else."""
    stock = interpreter.stock
    init, dot = stock.TensorHandle.__init__, stock.InterpreterBuilder.create_dot

    def unrounded(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if interpreter_values.is_bf16(dtype):
            self.data, self.dtype = np.asarray(data, np.float32), dtype
            self.attr = {} if attr is None else attr
        else:
            init(self, data, dtype, attr)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        for one in (a, b):
            if interpreter_values.is_bf16(one.dtype):
                one.data = interpreter_values.to_values(interpreter_values.to_bits(one.data))
        return dot(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stock.TensorHandle, "__init__", unrounded)
        patched.setattr(stock.InterpreterBuilder, "create_dot", create_dot)
        yield


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8).clone()


@contextlib.contextmanager
def rounded_on_the_way() -> Iterator[set[tuple[str, str]]]:
    """Fills (kernel, argument) of what is written otherwise where all is rounded late; and
    (kernel, "") of each kernel that ran."""
    found: set[tuple[str, str]] = set()
    run = interpreter.run

    def twice(launched: Any, kernel: str, grid: Any, arguments: dict[str, Any]) -> None:
        given = {name: getattr(one, "base", one) for name, one in arguments.items()}
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        stores = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors.values()}
        before = {at: one.clone() for at, one in stores.items()}
        with _rounded_late():
            run(launched, kernel, grid, arguments)
        late = {name: _bits(x) for name, x in tensors.items()}
        for at, one in stores.items():
            one.copy_(before[at])
        run(launched, kernel, grid, arguments)
        found.add((kernel, ""))
        found.update((kernel, n) for n, x in tensors.items() if not torch.equal(_bits(x), late[n]))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "run", twice)
        yield found
