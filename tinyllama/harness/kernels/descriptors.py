"""Descriptors of tensors, with which kernels copy whole tiles, as arguments of launches.

A descriptor is Triton's (``triton.tools.tensor_descriptor``) or Gluon's. Its class, its rank, its
dtype, its block and its layout decide which kernel is compiled; its shape, its strides and its
address are given at each launch.
"""

from typing import Any

_AT_EACH_LAUNCH = ("base", "shape", "strides")


def is_descriptor(kind: type) -> bool:
    """Whether a class is Triton's or Gluon's descriptor of a tensor."""
    return kind.__name__ == "TensorDescriptor" and kind.__module__.startswith("triton.")


def form(descriptor: Any) -> tuple[int, str]:
    """What a kernel is compiled for, except for the class and the dtype of the tensor."""
    fixed = [(k, v) for k, v in vars(descriptor).items() if k not in _AT_EACH_LAUNCH]
    return len(descriptor.shape), repr(fixed)


class _Memory:
    """Stands for a tensor, of which a launcher asks the address alone."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def without_tensor(descriptor: Any) -> Any:
    """A copy that holds no memory, for `at`."""
    return _copied(descriptor, None)


def at(descriptor: Any, address: int) -> Any:
    """A copy of the descriptor for a tensor of the same layout at this address."""
    return _copied(descriptor, _Memory(address))


def _copied(descriptor: Any, base: object) -> Any:
    """Without the checks of the class, which take longer than a launch."""
    copy: Any = object.__new__(type(descriptor))
    vars(copy).update(vars(descriptor))
    copy.base = base
    return copy
