"""Dispatch modes of torch that do not import its compiler, and let higher-order operators pass.

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
    before.

    It sees no higher-order operator: that of `torch.library.wrap_triton` launches its kernel.
    """

    supports_higher_order_operators = True  # torch 2.7 has no such switch, and refuses them

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
        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), named: Any = None) -> Any:
            if isinstance(func, torch._ops.HigherOrderOperator):
                return func(*args, **(named or {}))
            called = left_alone if "torch._dynamo" in sys.modules else written
            return called(mode, func, types, args, named)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
