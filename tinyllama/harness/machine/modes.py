"""Dispatch modes of torch that do not import its compiler.

torch wraps the function of a mode so that its compiler leaves it alone. The first call of what is
wrapped imports the compiler, 0.7 s of processor time, although nothing is compiled in a process
that has not imported it.
"""

import functools
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode whose function is wrapped where torch's compiler is loaded, and called as it is
    before."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is done here

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        written = cls.__dict__.get("__torch_dispatch__")
        if written is None:
            return
        left_alone = torch._disable_dynamo(written)

        @functools.wraps(written)
        def dispatch(*args: Any, **named: Any) -> Any:
            if "torch._dynamo" in sys.modules:
                return left_alone(*args, **named)
            return written(*args, **named)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
