"""Operators of interpreted values give the bits that Triton's own give, the second time too."""

import functools
import itertools
import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

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


@pytest.mark.parametrize("condition", [True, tl.constexpr(False), 2, "int32"], ids=str)
def test_choices_by_no_block_of_bits_are_tritons_own(condition: Any) -> None:
    own = libdevice.with_meaning(tl.where)
    remembered = operators.replacement(tl, "where", own)
    one, two = block(tl.float32, (4,), 1), block(tl.float32, (4,), 2)
    given = block(tl.int32, (4,), 3) if condition == "int32" else condition
    for x, y in ((one, two), (two, one), (one, 0.5)):
        assert outcome(remembered, given, x, y) == outcome(own, given, x, y)


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


@pytest.mark.parametrize("element", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stores_give_the_builder_what_tritons_own_give(
    dtype: Any, element: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def noted(self: Any, places: Any, value: Any, mask: Any, *rest: Any) -> None:
        builder_notes.note(places, (value, mask, rest, {}), builder_notes.STORE, None)
        data = [(np.asarray(one.data).tobytes(), one.data.shape) for one in (places, value, mask)]
        given.append((data, value.data.dtype, value.dtype.scalar, rest))

    monkeypatch.setattr(stock.InterpreterBuilder, "create_masked_store", noted)
    own, calls = counted(libdevice.with_meaning(tl.store))
    remembered = operators.replacement(tl, "store", own)
    for shape in SHAPES[1:]:
        for seed in (1, 2, 3):
            places, value = pointers(shape, seed, element), block(dtype, shape, seed)
            for mask in (None, block(tl.int1, shape, seed), block(tl.int1, (1,) * len(shape), 1)):
                libdevice.with_meaning(tl.store)(places, value, mask)
                remembered(places, value, mask)
    assert len(given) == 2 * 27
    assert given[::2] == given[1::2]
    types_are_shared = block(dtype, (4,), 1).type is block(dtype, (4,), 2).type  # from triton 3.4
    if types_are_shared and dtype == element != tl.int1:
        assert len(calls) < 27, "nothing was remembered"


def test_numbers_of_loops_are_remembered() -> None:
    """As numbers that are no loop's variables; each is one operation of Triton's own."""
    remembered, calls = counting("__add__")
    a = block(tl.int32, (4,), 1)
    for number in (3, patches.Index(3), 4, patches.Index(4), patches.Index(5)):
        assert (remembered(a, number).handle.data == a.handle.data + number).all()
    assert [right for _, right in calls] == [3, 4, 5]


def test_ranges_start_where_they_are_told() -> None:
    own = libdevice.with_meaning(tl.arange)
    remembered = operators.replacement(tl, "arange", own)
    for start, end in ((0, 8), (8, 16), (4, 8), (8, 16), (8, 12), (3, 6)):
        assert outcome(remembered, start, end) == outcome(own, start, end)


def test_what_was_remembered_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered, calls = counting("__add__")
    a, b = block(tl.float32, (2, 1), 1), block(tl.int32, (2, 4), 2)
    for right in (b, b, 3, 3, 4):
        remembered(a, right)
    assert [right for _, right in calls] == [b, 3, 4]
    # A sum that Triton makes otherwise than the builder says is not remembered.
    monkeypatch.setattr(operators, "same", lambda *_: False)
    c = block(tl.float16, (4,), 1)
    for _ in range(2):
        remembered(c, c)
    assert len(calls) == 5


def test_sums_of_pointers_and_offsets_are_seen_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    _, remembered = both("__add__")
    start, offsets = pointers((), 1), block(tl.int32, (2, 4), 2)
    remembered(start, offsets)
    monkeypatch.setattr(operators, "SUMS", [lambda *sides: seen.append(sides)])
    remembered(start, offsets)
    assert interpreter_values.SUMS is not operators.SUMS  # the one above is this test's own
    ((pointer, offset),) = seen
    assert pointer.shape == offset.shape == (2, 4)
    assert (offset == offsets.handle.data).all()


def test_what_is_remembered_is_left_where_overflows_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, calls = counted(libdevice.with_meaning(tl.tensor.__add__))
    remembered = operators.replacement(tl.tensor, "__add__", own)
    a, b = block(tl.int32, (4,), 1), block(tl.int32, (4,), 2)
    for _ in range(3):
        remembered(a, b)
    assert len(calls) == 1
    options = replace(stock.interpreter_builder.options, sanitize_overflow=True)
    monkeypatch.setattr(stock.interpreter_builder, "options", options)
    remembered(a, b)
    assert len(calls) == 2


def test_bits_of_another_shape_are_not_the_same() -> None:
    assert builder_notes.same(np.zeros((2, 3)), np.zeros((2, 3)))
    assert not builder_notes.same(np.zeros((2, 3)), np.zeros((3, 2)))
    assert not builder_notes.same(np.zeros(2, np.int32), np.zeros(2, np.float32))


def test_a_conversion_is_triton_s_own_only_the_first_time() -> None:
    own = both("to")[0]
    noted = Mock(wraps=own)
    cast = operators._cast(noted)
    kind = block(tl.int32, (4,), 0)
    for _ in range(3):
        assert outcome(cast, kind, tl.float32) == outcome(own, kind, tl.float32)
    assert [one.args[1] for one in noted.call_args_list] == [tl.float32]


def counted(own: Any) -> tuple[Any, list[Any]]:
    """A function that notes with what it is called."""
    calls: list[Any] = []

    def noted(*operands: Any) -> Any:
        calls.append(operands)
        return own(*operands)

    return noted, calls


def counting(name: str) -> tuple[Any, list[Any]]:
    """What is called for an operator, and the calls that it makes of Triton's own."""
    own, calls = counted(both(name)[0])
    return operators.replacement(tl.tensor, name, own), calls


@pytest.mark.parametrize("name", ["to", "where", "full", "load", "store"])
def test_what_triton_gives_its_functions_is_no_argument(name: str) -> None:
    """The builder, or what stands for it, by the version."""
    memory, value = np.arange(4, dtype=np.float32), block(tl.float32, (4,), 1)
    places = pointers((4,), 1)
    places.handle.data = memory.ctypes.data + 4 * np.arange(4, dtype=np.uint64)
    operands = {
        "to": (value, tl.int32),
        "where": (block(tl.int1, (4,), 1), value, 0.5),
        "full": ((4,), 2, tl.int32),
        "load": (places,),
        "store": (places, value),
    }[name]
    library = tl.tensor if name == "to" else tl
    own = libdevice.with_meaning(getattr(library, name))
    noted = Mock(side_effect=lambda *operands, **named: own(*operands))
    remembered = operators.replacement(library, name, noted)
    first, second = (remembered(*operands, _semantic=None, _builder=None) for _ in range(2))
    noted.assert_called_once()
    assert name == "store" or (first.handle.data == second.handle.data).all()
    assert name != "store" or (memory == value.handle.data).all()


@pytest.mark.parametrize("name", sorted(operators.NAMES))
def test_each_operation_that_has_a_result_is_tritons_own_only_the_first_time(name: str) -> None:
    """But for sums, products and remainders of bits, and for what raises."""
    wraps = name.replace("__r", "__") in ("__add__", "__sub__", "__mul__", "__mod__")
    for kind in (tl.int1, tl.int32, tl.uint8, tl.bfloat16, tl.float32):
        value = block(kind, (4,), 1)
        for other in (*DTYPES, 3, 2.5, True):
            remembered, calls = counting(name)
            right = block(other, (2, 4), 2) if isinstance(other, tl.dtype) else other
            raised = isinstance(outcome(remembered, value, right)[0], type)
            outcome(remembered, block(kind, (4,), 3), right)
            bits = kind == tl.int1 and (other is True or other == tl.int1)
            assert len(calls) == (2 if raised or (bits and wraps) else 1), (kind, other)
            if not raised:
                outcome(remembered, block(kind, (2, 4), 1), right)
                assert len(calls) == (3 if bits and wraps else 2), "another shape"


def test_of_pointers_sums_alone_are_remembered_and_each_element_has_its_size() -> None:
    for element, size in ((tl.int1, 1), (tl.float16, 2), (tl.float32, 4), (tl.float64, 8)):
        remembered, calls = counting("__add__")
        start = pointers((4,), 1, element)
        offsets = block(tl.int32, (4,), 2)
        for left, right in ((start, offsets), (offsets, start)):
            del calls[:]
            for _ in range(2):
                made = remembered(left, right)
                moved = made.handle.data.astype(np.int64) - start.handle.data.astype(np.int64)
                assert (moved == size * offsets.handle.data).all()
            assert len(calls) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_conversion_and_index_is_tritons_own_only_the_first_time(dtype: Any) -> None:
    value = block(dtype, (4,), 1)
    for target in DTYPES:
        own, calls = counted(both("to")[0])
        cast = operators._cast(own)
        for _ in range(3):
            found = cast(value, target)
        assert (found is value) == (target == dtype)
        # Some are more than one call of the builder: a comparison with zero, and a way by float32.
        several = dtype in (tl.float16, tl.bfloat16) and target != tl.float32
        several |= target == tl.int1
        assert len(calls) == (3 if several and target != dtype else 1)
    remembered, calls = counting("__getitem__")
    for slices, most in (((slice(None), None), 1), ((None, slice(None)), 1), (None, 3)):
        del calls[:]
        for _ in range(3):
            remembered(value, slices)
        assert len(calls) == most
    del calls[:]
    scalar = block(dtype, (), 1)
    for _ in range(2):
        outcome(remembered, scalar, (None,))
    assert len(calls) == 2, "what is no block is left to Triton"


def test_no_more_is_remembered_than_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "MOST", 2)
    for name, others in (("__add__", (1, 2, 3)), ("__getitem__", None)):
        remembered, calls = counting(name)
        value = block(tl.float32, (4,), 1)
        slices: Any = ((slice(None), None), (None, slice(None)), (None, slice(None), None))
        first, second, third = others or slices
        for one in (first, second, first, second):
            remembered(value, one)
        assert len(calls) == 2, "two have room"
        for one in (third, third, first):
            remembered(value, one)
        assert len(calls) == 4, "a third one makes room for itself"
    own, calls = counted(both("to")[0])
    cast = operators._cast(own)
    for target in (tl.int32, tl.float16, tl.int32, tl.float16, tl.int64, tl.int64, tl.int32):
        cast(value, target)
    assert len(calls) == 4


def test_ranges_of_other_bounds_are_tritons() -> None:
    own, calls = counted(libdevice.with_meaning(tl.arange))
    remembered = operators.replacement(tl, "arange", own)
    for start, end in ((0, 8), (tl.constexpr(0), tl.constexpr(8)), (0, tl.constexpr(8)), (4, 8)):
        made = remembered(start, end)
        expected = np.arange(getattr(start, "value", start), 8, dtype=np.int32)
        assert made.handle.data.tolist() == expected.tolist()
        assert (made.handle.data.dtype, str(made.type)) == (
            np.int32,
            f"<['{len(expected)}'], int32>",
        )
    assert calls == [(0, 8), (4, 8)]


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


def test_a_load_is_tritons_own_only_the_first_time() -> None:
    _, remembered, calls = loading()
    for other in (None, 0, 0.0, -0.0, 2.5, tl.constexpr(3)):
        for mask in (None, *MASKS[1:]) if other is None else MASKS[1:]:
            del calls[:]
            for seed in range(3):
                wanted = None if mask is None else block(tl.int1, mask, seed)
                remembered(places((2, 4), seed, tl.bfloat16), wanted, other)
            assert len(calls) == 1, (mask, other)


def test_no_more_loads_are_remembered_than_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accesses, "MOST", 2)
    _, remembered, calls = loading()
    pointer, mask = places((4,), 1, tl.float32), block(tl.int1, (4,), 1)
    for other, made in ((1.0, 1), (2.0, 2), (1.0, 2), (3.0, 3), (1.0, 4), (3.0, 4)):
        remembered(pointer, mask, other)
        assert len(calls) == made, other


def test_a_load_that_is_remembered_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(interpreter_values, "WATCHERS", [lambda *access: seen.append(access)])
    _, remembered, calls = loading()
    for seed in range(3):
        remembered(places((2, 4), seed, tl.float32), block(tl.int1, (4,), seed), 0.0)
    assert len(calls) == 1
    for seed, (addresses, accessed, size, kind) in enumerate(seen):
        assert (addresses == places((2, 4), seed, tl.float32).handle.data).all()
        assert (accessed == block(tl.int1, (4,), seed).handle.data).all()
        assert (size, kind) == (4, "load")
    assert len(seen) == 3
