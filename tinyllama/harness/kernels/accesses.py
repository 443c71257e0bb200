"""Loads and stores of interpreted values, remembered as `operators` remembers the others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tinyllama.harness.kernels.builder_notes import LOAD, MOST, STORE, converts, same, watched


class _Load:
    """What a load of pointers of one type gives to the builder; ``keep``: what ids stand for."""

    def __init__(self, noted: tuple[Any, Any, Any, Any], kind: Any, keep: Any) -> None:
        _, (_, self.default, self.rest, _), _, _ = noted
        self.kind, self.keep = kind, keep

    def __call__(self, pointers: Any, mask: Any) -> Any:
        shape = pointers.data.shape
        if mask is None:
            mask = stock.TensorHandle(np.ones(shape, bool), tl.int1)
        elif mask.data.shape != shape:
            mask = stock.TensorHandle(np.broadcast_to(mask.data, shape), tl.int1)
        made = stock.interpreter_builder.create_masked_load(
            pointers, mask, self.default, *self.rest
        )
        return tl.tensor(made, self.kind)


def _spread(given: Any, mask: Any, pointers: Any) -> bool:
    """Whether the builder got a load's mask as it is, or spread over the pointers."""
    if mask is None or given is mask.handle:
        return True
    return same(np.broadcast_to(mask.handle.data, np.shape(pointers.data)), given.data)


def load_of(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """Loads with a number, or nothing, where the mask is false."""
    known: dict[Any, _Load] = {}

    def first(key: Any, pointers: Any, mask: Any, other: Any, named: dict[str, Any]) -> Any:
        result, noted = watched(lambda: stock_operator(pointers, mask, other, **named))
        if len(known) >= MOST:
            known.clear()
        if len(noted) and noted[-1][2] is LOAD and noted[-1][3] is result.handle:
            handle, (given, _, _, by_name), _, _ = noted[-1]
            as_it_is = handle is pointers.handle and not by_name
            if as_it_is and _spread(given, mask, handle):
                keep = pointers.type, None if mask is None else mask.type
                known[key] = _Load(noted[-1], result.type, keep)
        return result

    def load(pointers: Any, mask: Any = None, other: Any = None, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        plain = other.value if type(other) is tl.constexpr else other
        of_tensors = type(pointers) is tl.tensor and (mask is None or type(mask) is tl.tensor)
        kind = type(plain)
        number = plain is None or kind is float or kind is int
        if rest or not of_tensors or not number or any(type(v) is not str for v in named.values()):
            return stock_operator(pointers, mask, other, *rest, **named)
        value = plain.hex() if kind is float else plain
        key = (
            id(pointers.type),
            None if mask is None else id(mask.type),
            kind,
            value,
            tuple(named.items()),
        )
        found = known.get(key)
        if found is None:
            return first(key, pointers, mask, other, named)
        return found(pointers.handle, None if mask is None else mask.handle)

    return load


class _Store:
    """What a store of a value of one type gives to the builder; ``keep``: what ids stand for."""

    def __init__(self, noted: tuple[Any, Any, Any, Any], keep: Any) -> None:
        _, (stored, _, self.rest, _), _, _ = noted
        self.made, self.dtype, self.keep = stored.data.dtype, stored.dtype, keep

    def __call__(self, pointers: Any, stored: Any, mask: Any) -> None:
        shape = pointers.data.shape
        if stored.data.shape != shape or stored.dtype is not self.dtype:
            data = np.broadcast_to(stored.data.astype(self.made, copy=False), shape)
            stored = stock.TensorHandle(data, self.dtype)
        if mask is None:
            mask = stock.TensorHandle(np.ones(shape, bool), tl.int1)
        elif mask.data.shape != shape:
            mask = stock.TensorHandle(np.broadcast_to(mask.data, shape), tl.int1)
        stock.interpreter_builder.create_masked_store(pointers, stored, mask, *self.rest)


def store_of(stock_operator: Callable[..., Any]) -> Callable[..., Any]:
    """Stores of a block or scalar of the language."""
    known: dict[Any, _Store] = {}

    def first(key: Any, pointers: Any, stored: Any, mask: Any, named: dict[str, Any]) -> Any:
        result, noted = watched(lambda: stock_operator(pointers, stored, mask, **named))
        if len(known) >= MOST:
            known.clear()
        if len(noted) and noted[-1][2] is STORE:
            handle, (given, allowed, _, by_name), _, _ = noted[-1]
            if (
                handle is pointers.handle
                and not by_name
                and converts(stored, given)
                and _spread(allowed, mask, handle)
            ):
                keep = pointers.type, stored.type, None if mask is None else mask.type
                known[key] = _Store(noted[-1], keep)
        return result

    def store(pointers: Any, value: Any, mask: Any = None, *rest: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        named.pop("_builder", None)
        of_tensors = type(pointers) is type(value) is tl.tensor
        of_tensors = of_tensors and (mask is None or type(mask) is tl.tensor)
        if rest or not of_tensors or any(type(one) is not str for one in named.values()):
            return stock_operator(pointers, value, mask, *rest, **named)
        types = id(pointers.type), id(value.type), None if mask is None else id(mask.type)
        key = (*types, *named.items())
        found = known.get(key)
        if found is None:
            return first(key, pointers, value, mask, named)
        return found(pointers.handle, value.handle, None if mask is None else mask.handle)

    return store
