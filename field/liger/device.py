"""What releases ask of a GPU, answered for a CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from tinyllama.harness.kernels import jit, tl


class Scalar(float):
    """A floating-point argument of a kernel that calls ``.to`` on it.

    Compiled, such an argument is a float32 scalar; triton's interpreter leaves it a Python float.
    """

    def to(self, dtype: Any) -> Scalar:
        return self


class _Overlay:
    """An object with some attributes of its own in front of another's."""

    def __init__(self, behind: Any, **own: Any) -> None:
        self._behind = behind
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


@jit
def rsqrt(x: Any) -> Any:
    return tl.rsqrt(x)


def on_cpu(module: ModuleType) -> None:
    """Let a module with a norm run on a CPU: it sees one processor, and an ``rsqrt`` of triton's.

    Early releases ask the GPU how many it has, wherever their tensors are. libdevice's functions
    are external code, which triton's interpreter passes over: they return None.
    """
    properties = _Overlay(None, multi_processor_count=1)
    cuda = _Overlay(torch.cuda, get_device_properties=lambda device: properties)
    vars(module).update(torch=_Overlay(torch, cuda=cuda), rsqrt=rsqrt)
