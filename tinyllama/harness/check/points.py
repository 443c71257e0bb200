"""The points at which a candidate is tried beyond its declared cases: a fixed list.

A point is a case with one factor at a boundary: the length of an axis, a parameter, a layout, a
dtype, which gradients are wanted, or values of the inputs (`boundary_inputs`). Lengths follow from
powers of two, since kernels work in blocks of these, and from numbers that the code compares with.
Then come two factors at once: values in long rows, two long axes, two parameters, another case.
What is tried does not depend on the machine or on time; a point whose reference writes more than
`MOST_WORK` elements is left out.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.check.boundary_inputs import Painted, painted
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.code_numbers import compared_with, thresholds
from tinyllama.harness.check.evaluate import Inputs
from tinyllama.harness.check.finding import Candidate
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.layouts import SINGLE
from tinyllama.harness.check.resizing import draws_for, general, resized
from tinyllama.harness.check.work import MOST_WORK, Growth, work_of
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.declare.values import constant

SIZES, VALUES = "sizes", "special values"  # the checks that points belong to

# 1 to 3, where both ends of a row are near; a few more than each power of two; an odd number of
# blocks of 8, 16 and 32, of which code may take two at once; three blocks of 64 to 1,024; whole
# blocks; and more programs than the 65,535 that some axes of a grid may have.
LENGTHS = (
    *(1, 2, 3, 67, 72, 80, 96, 131, 192, 259, 384, 768, 770, 1024, 1025, 1536, 2051, 3072),
    *(4096, 4099, 8197, 16388, 65539),
)
VARIED_LENGTH = 259  # at which extremes, parameters and each gradient alone are tried
LAYOUT_LENGTH = 1025  # at which other layouts are tried: the second block of 1,024
LONG = (131, 259, 515, 1025, 2051)  # of a row with changed values, the longest that costs little
OF_DTYPES = (96, 2051, 8197, 65539)  # at which the other dtypes are tried
BOTH, ALL = 131, 67  # of two axes at once, and of all of three or more
LISTS = ((3,), (3, 1, 2) * 22 + (3,), (3, 1, 2) * 43 + (3, 1), (3, 0, 2))  # 1, 67, 131, 3 tensors
LEADING = ((), (5,), (2, 3), (2, 1, 3))  # axes in place of those that may be any number
OTHER_CASES, OTHER_CASES_OF_VALUES = 3, 1
# Where a parameter is zero: values that are tiny, or whose exponential is zero.
BESIDE_ZERO = re.compile(r"times .*e-(1\d|20)\b|plus -?32768")
MOST_WORK_OF_VALUES = 2**19
MOST_ACCESSES = 300  # loads and stores of interpreted programs, of a case that is tried many times
ELEMENT_SLACK = 8.0  # times the largest usual error of an element, in long rows of 16 bits
EPSILON = 1e-2  # a parameter below it may be one, which is seen when it is far larger
LARGEST_WHOLE = 1025  # for a parameter that is a whole number


@dataclass(frozen=True)
class Point:
    """A case, with changed values or not. check: `SIZES` or `VALUES`; text: what is at a boundary,
    in words; parameter: whether it is a parameter; of_elements: as `compare` takes it; axes: that
    have another length than in the general case."""

    check: str
    text: str
    case: OpCase
    painted: Painted | None = None
    parameter: bool = False
    of_elements: float | None = None
    axes: tuple[str, ...] = ()


def size_points(candidate: Candidate) -> Iterator[Point]:
    """Lengths of axes, with what depends on them, from few elements to many."""
    base = general(candidate)
    turns = thresholds(candidate.provider.call)
    axes = [axis for axis, size in base.case.dims.items() if isinstance(size, int)]
    lengths = sorted({*LENGTHS, *turns, *(turn + 1 for turn in turns)})

    def sized(case: OpCase, **sizes: int) -> OpCase | None:
        resized_case: OpCase | None = case
        for axis, size in sizes.items():
            resized_case = resized_case and resized(candidate, resized_case, axis, size)
        return resized_case if resized_case and _allowed(candidate, resized_case) else None

    def point(case: OpCase | None, text: str = "", **more: Any) -> Iterator[Point]:
        if case is not None:
            yield Point(SIZES, text, case, **more)

    for length, axis in itertools.product(lengths, axes):
        case = sized(base, **{axis: length})
        if case is None:
            continue
        yield from point(case, axes=(axis,))
        for varied in _varied(candidate, case, length):
            yield from point(varied, axes=(axis,))
        for dtype in candidate.dtypes if length in OF_DTYPES else ():
            of_dtype = replace(case, dtype=dtype)
            if dtype is not base.dtype and not of_dtype.unsupported():
                yield from point(of_dtype, axes=(axis,), of_elements=ELEMENT_SLACK)
    several: list[tuple[Sequence[str], int]] = [
        (pair, BOTH) for pair in itertools.combinations(axes, 2)
    ]
    for turn in (turn + more for turn in turns for more in (0, 3)):
        several += [(pair, turn) for pair in itertools.combinations(axes, 2)]
    if len(axes) > 2:
        several.append((axes, ALL))
    for group, length in several:
        yield from point(sized(base, **dict.fromkeys(group, length)), axes=tuple(group))
    for of_dtype in [c for c in candidate.plain_cases() if _computed_otherwise(c, base)][
        :OTHER_CASES
    ]:
        for axis, now in of_dtype.case.dims.items():
            for length in (VARIED_LENGTH, *turns) if isinstance(now, int) and now > 1 else ():
                yield from point(sized(of_dtype, **{axis: length}))
    yield from map(partial(Point, SIZES, ""), _lists(candidate, base))


def _allowed(candidate: Candidate, case: OpCase, most: int = MOST_WORK) -> bool:
    op = candidate.op
    return elements(op, case.case) <= most / 4 and work_of(op, case.case, case.dtype) <= most


def _varied(candidate: Candidate, case: OpCase, length: int) -> Iterator[OpCase]:
    """The case with what is tried at a length beside the usual values."""
    op = candidate.op
    upstream = bool(op.differentiable)
    if length == 1:
        yield replace(case, layout=SINGLE, upstream=SINGLE if upstream else "contiguous")
    if length == VARIED_LENGTH:
        for extreme in op.extremes:
            yield replace(case, extreme=extreme)
        if upstream:
            yield replace(case, wanted=())
        for name in op.differentiable if len(op.differentiable) > 1 else ():
            yield replace(case, wanted=(name,))
        for name, numbers in settings(candidate, case).items():
            yield from (with_params(case, {name: number}) for number in numbers[:2])
    if length == LAYOUT_LENGTH:
        for layout in ("distinct", "transposed"):
            yield replace(case, layout=layout, upstream=layout if upstream else "contiguous")
    of_bytes = [
        n for n, declared in op.inputs.items() if declared.dtype in (torch.int8, torch.uint8)
    ]
    if length == LONG[-1] and of_bytes and not any(o.floating for o in op.outputs.values()):
        most = {
            n: constant(max(int(d.max()) for d in draws_for(candidate, case, n))) for n in of_bytes
        }
        values = {**case.case.values, **most}
        new_case = Case(why=case.case.why, params=case.case.params, values=values, **case.case.dims)
        yield replace(case, case=new_case)  # sums of products that are not exact in float32


def _computed_otherwise(case: OpCase, base: OpCase) -> bool:
    """Whether a case has other parameters, or an axis of one entry."""
    single = any(size == 1 != base.case.dims[axis] for axis, size in case.case.dims.items())
    return case.dtype is base.dtype and (single or case.case.params != base.case.params)


def _lists(candidate: Candidate, base: OpCase) -> Iterator[OpCase]:
    """Lists of other lengths, and other numbers of leading axes."""
    op = candidate.op
    for axis, size in base.case.dims.items():
        if isinstance(size, tuple) and any(i.many and axis in i.axes for i in op.inputs.values()):
            yield from (replace(base, case=base.case.resized(**{axis: s})) for s in LISTS)
    for axis in op.leading[:1]:
        yield from (replace(base, case=base.case.resized(**{axis: axes})) for axes in LEADING)


def with_params(case: OpCase, params: Mapping[str, Any]) -> OpCase:
    before = case.case
    params = {**before.params, **params}
    return replace(
        case, case=Case(why=before.why, params=params, values=before.values, **before.dims)
    )


def settings(candidate: Candidate, case: OpCase) -> dict[str, list[Any]]:
    """Other values of each parameter that is a number or a boolean, the most usual first."""
    params = {**candidate.op.params, **case.case.params}
    numbers_by_name = {
        name: _other_numbers(candidate, name, value) for name, value in params.items()
    }
    return {
        name: [number for number in dict.fromkeys(numbers) if number != params[name]]
        for name, numbers in numbers_by_name.items()
    }


def _other_numbers(candidate: Candidate, name: str, value: Any) -> Sequence[Any]:
    if type(value) is bool:
        return (not value,)
    compared = compared_with(candidate.provider.call, name)
    if type(value) is float:
        factors = (64, *((1e3, 1e6) if abs(value) < EPSILON else ()))
        nearby = [number * factor for number in compared for factor in (1.0, 0.5, 2.0)]
        integer = 2 if value != 2 else 3  # an integer, where a number is expected
        return (value * 0.5, value * 3, integer, 0.0, 1.0, *nearby, *(value * f for f in factors))
    if type(value) is int:
        default = candidate.op.params.get(name, value)
        numbers = [value + 1, value - 1, 0, value + 2, default + 1, default - 1]
        numbers += [int(number) + step for number in compared for step in (0, 1, -1)]
        return [number for number in numbers if number < LARGEST_WHOLE]
    return ()


def with_settings(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, OpCase]]:
    """The case with each of `settings` alone, then with two of them at once."""
    numbers_by_name = settings(candidate, case)
    alone = [{name: number} for name, numbers in numbers_by_name.items() for number in numbers]
    two = [
        {name: number, second: other_number}
        for name, second in itertools.combinations(numbers_by_name, 2)
        for number in numbers_by_name[name][:2]
        for other_number in numbers_by_name[second][:2]
    ]
    for params in (*alone, *two):
        text = ", ".join(f"{name} = {value!r}" for name, value in params.items())
        yield text, with_params(case, params)


def value_points(candidate: Candidate) -> Iterator[Point]:
    """Parameters and changed values of the general case, then in long rows, in other cases and in
    other dtypes."""
    base, op = general(candidate), candidate.op

    def values(case: OpCase, only: str = "", text: str = "") -> Iterator[Point]:
        for change in painted(candidate, case, only):
            yield Point(VALUES, f"{text}{change.text}", case, change)

    def small(cases: Iterable[OpCase | None]) -> Iterator[OpCase]:
        for case in cases:
            cheap = case and _allowed(candidate, case, MOST_WORK_OF_VALUES)
            if case and cheap and accesses_of(candidate, case) <= MOST_ACCESSES:
                yield case

    for text, case in with_settings(candidate, base):
        yield Point(VALUES, text, case, parameter=True)
    yield from values(base)
    for name, numbers in settings(candidate, base).items():
        if 0.0 in numbers and type(op.params.get(name)) is float:  # as an epsilon of none
            case = with_params(base, {name: 0.0})
            for change in painted(candidate, case, "range"):
                if BESIDE_ZERO.search(change.text):
                    yield Point(
                        VALUES, f"{name} = 0.0, {change.text}", case, change, parameter=True
                    )
    for axis in [axis for axis, size in base.case.dims.items() if isinstance(size, int)]:
        if (long := _long(candidate, base, axis)) is not None:
            yield from values(long, "places")
    of_dtype = {
        dtype: [c for c in candidate.plain_cases() if c.dtype is dtype]
        for dtype in candidate.dtypes
    }
    for dtype, cases in of_dtype.items():
        largest = sorted(cases, key=lambda c: elements(op, c.case), reverse=True)
        if dtype is not base.dtype and (largest_small := next(small(largest), None)) is not None:
            yield from values(largest_small, "range")
    other_cases = [c for c in of_dtype[base.dtype] if c.case is not base.case]
    for case in itertools.islice(small(other_cases), OTHER_CASES_OF_VALUES):
        yield from values(case, "places")


def _long(candidate: Candidate, base: OpCase, axis: str) -> OpCase | None:
    """The case with the longest axis of `LONG` that costs little."""
    accesses, longest = accesses_of(candidate, base), None
    growth = Growth(base.case.dims[axis], accesses)
    for length in LONG:
        case = resized(candidate, base, axis, length)
        if not case or not _allowed(candidate, case, MOST_WORK_OF_VALUES):
            break
        if accesses * growth.times(length) > MOST_ACCESSES:
            break
        growth.add(length, accesses_of(candidate, case))
        longest = case
    return longest


def accesses_of(candidate: Candidate, case: OpCase) -> int:
    """The loads and stores of all interpreted programs of a call; 0 where none is interpreted."""
    guards = GuardedMemory()
    with contextlib.suppress(Exception):
        candidate.results(candidate.inputs(case), guards=guards)
    return guards.accesses


def inputs_of(candidate: Candidate, point: Point) -> Inputs:
    return point.painted.inputs if point.painted else candidate.inputs(point.case)


def times_as_large(typical: Inputs, inputs: Inputs) -> float:
    """How many times as large as usual the largest of the inputs is, at least 1."""
    factors = [1.0]
    for name, value in inputs.args.items():
        before = typical.args[name]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            largest, largest_before = value.double().abs().max(), before.double().abs().max()
            if value.isfinite().all() and largest_before > 0:
                factors.append(float(largest / largest_before))
    return max(factor for factor in factors if not math.isnan(factor))
