"""Scans and reductions of Triton's interpreter, in the order in which a device makes them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter as stock

Array = Any  # a numpy array

_cumsum, _min_max = stock.ScanOps.cumsum, stock.ReduceOps.min_max
_scan_in_turn, _reduce_in_turn = stock.ScanOps.generic_scan, stock.ReduceOps.generic_reduce


def _cumsum_in_pairs(self: Any, input: Any) -> list[Any]:
    """A device adds up pairs, then pairs of these; numpy one element after the other, which loses
    more digits the longer the row is."""
    values = np.asarray(input.handle.data)
    if values.dtype == np.bool_ or not values.ndim:
        return list(_cumsum(self, input))
    rows = np.moveaxis(np.array(values), self.axis or 0, -1)
    step = 1
    while step < rows.shape[-1]:
        rows[..., step:] = rows[..., step:] + rows[..., :-step]
        step *= 2
    return [self.to_tensor(np.moveaxis(rows, -1, self.axis or 0), dtype=input.dtype)]


# A device combines parts of a row that are combined already; the stock interpreter goes one element
# after the other, where a function that is not associative is right, too. Where one does not take
# blocks, the stock interpreter decides.


def _combined(self: Any, left: list[Array], right: list[Array], like: Any) -> list[Array]:
    """The author's function of two blocks of each input."""
    pairs = zip((*left, *right), (*like, *like), strict=True)
    results = self.combine_fn.fn(*(self.to_tensor(data, tensor.dtype) for data, tensor in pairs))
    results = results if isinstance(results, tuple) else (results,)
    for result, tensor in zip(results, like, strict=True):
        if result.dtype != tensor.dtype or result.handle.data.shape != left[0].shape:
            raise TypeError("other types or shapes than those of the elements")
    return [result.handle.data for result in results]


def _scan_by_doubling(self: Any, input: Any) -> Any:
    rows, step = [tensor.handle.data for tensor in input], 1
    size, ndim = rows[0].shape[self.axis], rows[0].ndim
    place = np.arange(size).reshape([-1 if axis == self.axis else 1 for axis in range(ndim)])
    try:
        while step < size:
            before = [np.roll(row, step, self.axis) for row in rows]
            new = _combined(self, before, rows, input)
            rows = [np.where(place < step, *pair) for pair in zip(rows, new, strict=True)]
            step *= 2
    except Exception:
        return _scan_in_turn(self, input)
    return [self.to_tensor(data, x.dtype) for data, x in zip(rows, input, strict=True)]


def _reduce_by_halves(self: Any, input: Any) -> Any:
    axis, rows = self.axis or 0, [tensor.handle.data for tensor in input]
    rows = [x.reshape(-1) if self.axis is None else np.moveaxis(x, axis, 0) for x in rows]
    try:
        while len(rows[0]) > 1:
            rows = _combined(self, [x[::2] for x in rows], [x[1::2] for x in rows], input)
    except Exception:
        return _reduce_in_turn(self, input)
    if self.axis is None:
        ones = (1,) * input[0].handle.data.ndim
        rows = [x.reshape(ones) if self.keep_dims else x[0].item() for x in rows]
    else:
        rows = [np.moveaxis(x, 0, axis) if self.keep_dims else x[0] for x in rows]
    return [self.to_tensor(data, x.dtype) for data, x in zip(rows, input, strict=True)]


# A maximum ignores NaN, as on a device; that of nothing but NaN is a NaN, and its place the first.
# In Triton 3.6 the interpreter's is a NaN wherever there is one; later, numpy warns of NaN alone,
# or raises an error.


def _place_without_nan(place: Callable[..., Array], least: float) -> Callable[..., Array]:
    def place_of(data: Array, **axis: Any) -> Array:
        if data.dtype.kind == "f":
            data = np.where(np.isnan(data), least, data)
        return place(data, **axis)

    return place_of


_WITHOUT_NAN: dict[Any, Any] = {
    **dict.fromkeys((np.max, np.nanmax), np.fmax.reduce),
    **dict.fromkeys((np.min, np.nanmin), np.fmin.reduce),
    **dict.fromkeys((np.argmax, np.nanargmax), _place_without_nan(np.argmax, -np.inf)),
    **dict.fromkeys((np.argmin, np.nanargmin), _place_without_nan(np.argmin, np.inf)),
}


def _min_max_without_nan(
    self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None
) -> Any:
    value, index = (_WITHOUT_NAN.get(op, op) for op in (val_reduce_op, idx_reduce_op))
    return _min_max(self, input, value, index)


stock.ScanOps.cumsum, stock.ScanOps.generic_scan = _cumsum_in_pairs, _scan_by_doubling
stock.ReduceOps.generic_reduce = _reduce_by_halves
stock.ReduceOps.min_max = _min_max_without_nan
