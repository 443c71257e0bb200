"""Triton's types made once: most of an interpreted operation is spent on making them again.

Triton makes a block type for each value, with checks of its shape, and for each tensor a tuple of
its shape and that tuple's type. Here blocks of one element and shape share a type, and tensors of
a type share what follows from it. Nothing of what kernels compute or compile to changes.
"""

from typing import Any

import triton.language as tl
from triton.language import semantic

MOST = 4096  # types that are kept: each launch brings pointers of its own
_BLOCKS: dict[Any, Any] = {}
_SHAPES: dict[tuple[int, ...], Any] = {}
_POINTERS: dict[tuple[str, Any], Any] = {}


def share() -> None:
    """Once in a process. Not before triton 3.4, where a shape may hold what has no hash."""
    if hasattr(semantic, "TritonSemantic"):
        _share_blocks()
        _share_shapes()
        _compare_fast()
        _leave_equal_blocks(semantic.TritonSemantic)


def _share_blocks() -> None:
    block = tl.block_type
    make = block.__init__

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        if cls is not block or len(args) != 2 or named:
            return object.__new__(cls)
        key = id(args[0]), *args[1]  # a type that is kept keeps its element type, and so its id
        found = _BLOCKS.get(key)
        return object.__new__(cls) if found is None else found

    def init(self: Any, *args: Any, **named: Any) -> None:
        if "name" in self.__dict__:
            return
        make(self, *args, **named)
        if type(self) is block and len(args) == 2:  # Gluon's types are blocks with a layout
            if len(_BLOCKS) >= MOST:
                _BLOCKS.clear()
            key = id(args[0]), *args[1]
            _BLOCKS[key] = self
        self.shape = _SHAPES.setdefault(tuple(self.shape), self.shape)

    block.__new__, block.__init__ = new, init


def _share_shapes() -> None:
    make = tl.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            make(self, handle, type)
            type._of_tensors = {n: value for n, value in vars(self).items() if n != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    tl.tensor.__init__ = init


def pointer(argument: Any) -> Any:
    """A kernel's argument that is a pointer, of the one type that pointers like it share."""
    kind = argument.type
    shared = _POINTERS.setdefault((kind.name, kind.address_space), kind)
    argument.handle.dtype = shared
    return tl.tensor(argument.handle, shared)


def _compare_fast() -> None:
    """Each operation compares types several times, mostly an object with itself."""

    def compared(stock: Any) -> Any:
        return lambda self, other: self is other or stock(self, other)

    for kind in (tl.dtype, tl.block_type):
        hashed = kind.__hash__
        kind.__eq__, kind.__hash__ = compared(kind.__eq__), hashed


def _leave_equal_blocks(owner: Any) -> None:
    stock = owner.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return stock(self, lhs, rhs)

    owner.broadcast_impl_value = broadcast
