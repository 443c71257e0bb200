"""Operators of interpreted values give the bits that Triton's own give, the second time too."""

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter as stock

# The interpreter is loaded first: it changes what these tests look at.
from tinyllama.harness.kernels import (  # noqa: F401
    accesses,
    builder_notes,
    interpreter,
    interpreter_values,
    libdevice,
    operators,
    patches,
)

DTYPES = (tl.int1, tl.int32, tl.uint32, tl.int64, tl.uint8, tl.float16, tl.bfloat16, tl.float32)
SHAPES = ((), (4,), (2, 1), (2, 4))
NUMBERS = (3, 1, True, 1.0, 0, -2, 2**40, 2.5, 0.0, -0.0, 1e-42, float("nan"), tl.constexpr(5))


def block(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    """A value of whole numbers from -9 to 9, or from 0 to 9 without a sign, none of them zero."""
    random = np.random.default_rng(seed)
    data: Any = random.integers(1, 10, shape or (1,))
    if not dtype.is_int_unsigned() and dtype != tl.int1:
        data = data * random.choice([-1, 1], data.shape)
    if dtype == tl.int1:
        data = data > 4
    handle = stock.TensorHandle(data.astype(stock._get_np_dtype(dtype)), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


pointer_type = functools.cache(tl.pointer_type)  # one for all of an element, as in a launch


def pointers(shape: tuple[int, ...], seed: int, element: Any = tl.float32) -> Any:
    kind = pointer_type(element)
    data = np.random.default_rng(seed).integers(0, 2**40, shape or (1,)).astype(np.uint64)
    handle = stock.TensorHandle(data, kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def outcome(operator: Any, *operands: Any) -> Any:
    """What the builder gets: the bits, their type and that of the value; or the error's text."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            made = operator(*operands)
        except Exception as error:
            return type(error), str(error)
    data = np.asarray(made.handle.data)
    return data.tobytes(), data.dtype, data.shape, str(made.handle.dtype), str(made.type)


def both(name: str) -> tuple[Any, Any]:
    """An operator of tensors as Triton has it, and what is called for it."""
    own = libdevice.with_meaning(getattr(tl.tensor, name))
    return own, operators.replacement(tl.tensor, name, own)


@pytest.mark.parametrize("name", sorted(operators.NAMES))
def test_an_operator_gives_the_bits_of_tritons_own(name: str) -> None:
    own, remembered = both(name)
    sides = [(block(a, shape, 1), block(a, shape, 2)) for a in DTYPES for shape in SHAPES]
    sides += [(pointers(shape, 1), pointers(shape, 2)) for shape in SHAPES]
    kinds = [*sides[::3], *((number, number) for number in NUMBERS)]
    for (first, second), (a, b) in itertools.product(sides[::2], kinds):
        for left, right in ((first, a), (second, b)):
            expected = outcome(own, left, right)
            assert outcome(remembered, left, right) == expected, (left.type, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_and_indices_give_the_bits_of_tritons_own(dtype: Any) -> None:
    for shape, seed in itertools.product(SHAPES, (1, 2)):
        own, remembered = both("to")
        value = block(dtype, shape, seed)
        for target in DTYPES:
            for _ in range(2):
                assert outcome(remembered, value, target) == outcome(own, value, target)
        own, remembered = both("__getitem__")
        for slices in ((slice(None), None), (None, slice(None)), None, (slice(1), None), (0,)):
            for _ in range(2):
                assert outcome(remembered, value, slices) == outcome(own, value, slices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_give_the_bits_of_tritons_own(dtype: Any) -> None:
    own = libdevice.with_meaning(tl.where)
    remembered = operators.replacement(tl, "where", own)
    for shape, other, seed in itertools.product(SHAPES, DTYPES, (1, 2)):
        condition = block(tl.int1, shape, seed)
        one, two = block(dtype, shape, seed), block(other, shape, seed + 2)
        for x, y in ((one, two), (two, 0.5), (3, one), (patches.Index(seed), one), (one, False)):
            for _ in range(2):
                assert outcome(remembered, condition, x, y) == outcome(own, condition, x, y)


def test_blocks_of_a_number_give_the_bits_of_tritons_own() -> None:
    own = libdevice.with_meaning(tl.full)
    remembered = operators.replacement(tl, "full", own)
    shapes = ((), (4,), [2, 4], (tl.constexpr(2), 1))
    for shape, number, dtype in itertools.product(shapes, NUMBERS, DTYPES):
        first, second = (outcome(remembered, shape, number, dtype) for _ in range(2))
        assert first == second == outcome(own, shape, number, dtype), (shape, number, dtype)
    for shape in ([2.0, 4], [2, 4.0], [block(tl.int32, (), 1), 4], [2, block(tl.int32, (), 1)]):
        refused = outcome(own, shape, 1, tl.int32)
        assert isinstance(refused[0], type), "no shape"
        assert outcome(remembered, shape, 1, tl.int32) == refused


def test_ranges_start_where_they_are_told() -> None:
    own = libdevice.with_meaning(tl.arange)
    remembered = operators.replacement(tl, "arange", own)
    for start, end in ((0, 8), (8, 16), (4, 8), (8, 16), (8, 12), (3, 6)):
        assert outcome(remembered, start, end) == outcome(own, start, end)


def counted(own: Any) -> tuple[Any, list[Any]]:
    """A function that notes with what it is called."""
    calls: list[Any] = []

    def noted(*operands: Any) -> Any:
        calls.append(operands)
        return own(*operands)

    return noted, calls


MEMORY = np.random.default_rng(0).integers(0, 64, 256).astype(np.uint8)  # bits of small numbers
DEFAULTS = (None, 0, True, 0.0, -0.0, 2.5, float("nan"), tl.constexpr(5), "a block")
MASKS = ((), (4,), (1, 4), (2, 1), (2, 4))


def places(shape: tuple[int, ...], seed: int, element: Any) -> Any:
    """Pointers into that memory."""
    made = pointers(shape, seed, element)
    made.handle.data = made.handle.data % np.uint64(31) * np.uint64(8) + np.uint64(
        MEMORY.ctypes.data
    )
    return made


def loading() -> tuple[Any, Any, list[Any]]:
    """Triton's own load, what is called for it, and the calls that this makes of Triton's."""
    own = libdevice.with_meaning(tl.load)
    noted, calls = counted(own)
    return own, operators.replacement(tl, "load", noted), calls


@pytest.mark.long
@pytest.mark.parametrize(
    "element", [tl.int1, tl.int32, tl.float16, tl.bfloat16, tl.float32], ids=str
)
def test_a_load_gives_the_bits_of_tritons_own(element: Any) -> None:
    own, remembered, _ = loading()
    masks = [(None, None), *((block(tl.int1, m, 1), block(tl.int1, m, 2)) for m in MASKS)]
    masks.append((block(tl.int32, (4,), 1), True))
    for shape, pair, number in itertools.product(SHAPES, masks, DEFAULTS):
        other = block(element, shape, 5) if number == "a block" else number
        for seed, mask in enumerate((*pair, pair[0])):
            given = places(shape, seed, element), mask, other
            assert outcome(remembered, *given) == outcome(own, *given), (shape, mask, other)
