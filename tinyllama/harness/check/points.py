"""The points at which a candidate is tried beyond its declared cases: a fixed list.

A point is a case with one factor at a boundary: the length of an axis, a parameter, a layout, a
dtype, which gradients are wanted, or values of the inputs (`boundary_inputs`). Lengths follow from
powers of two, since kernels work in blocks of these, and from numbers that the code compares with.
Then come two factors at once: values in long rows, two long axes, two parameters, another case.
What is tried does not depend on the machine or on time: a point is left out by the work of its
reference and the accesses of its interpreted programs (`Budget`).
"""

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from tinyllama.harness.check.boundary_inputs import Painted, painted, painted_upstream
from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.code_numbers import compared_with, thresholds
from tinyllama.harness.check.evaluate import Inputs, shapes_of, without_values
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.layouts import SINGLE
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.machine.modes import DispatchMode

# The checks that points belong to.
SIZES, VALUES, UPSTREAM, EMPTY = "sizes", "special values", "scaled upstream", "empty batch"

# 1 to 3, where both ends of a row are near; a few more than each power of two; an odd number of
# blocks of 8, 16 and 32, of which code may take two at once; three blocks of 64 to 1,024; whole
# blocks; and more programs than the 65,535 that some axes of a grid may have.
LENGTHS = (
    *(1, 2, 3, 67, 72, 80, 96, 131, 192, 259, 384, 768, 770, 1024, 1025, 1536, 2051, 3072),
    *(4096, 4099, 8197, 16388, 65539),
)
# Around each power of two, while the other axes are short: a block that is full, or lacks or has
# one element more. Blocks of less than 32 divide these.
POWERS = tuple(2**k + more for k in range(5, 13) for more in (-1, 0, 1))
VARIED_LENGTH = 259  # at which extremes, parameters and each gradient alone are tried
LAYOUT_LENGTH = 1025  # at which other layouts are tried: the second block of 1,024
LONG = (131, 259, 515, 1025, 2051)  # of a row with changed values, the longest that costs little
LONGEST_SHORT = 3  # of an axis that is short while another one is long
LONG_ENOUGH = 1025  # of an axis: what is longer need not be tried while the other axes are short
OF_DTYPES = (96, 2051, 8197, 65539)  # at which the other dtypes are tried
BOTH, ALL = 131, 67  # of two axes at once, and of all of three or more
LISTS = ((3,), (3, 1, 2) * 22 + (3,), (3, 1, 2) * 43 + (3, 1), (3, 0, 2))  # 1, 67, 131, 3 tensors
LEADING = ((), (5,), (2, 3), (2, 1, 3))  # axes in place of those that may be any number
OTHER_CASES = 3
# Where a parameter is zero: values that are tiny, or whose exponential is zero.
BESIDE_ZERO = re.compile(r"times .*e-(1\d|20)\b|plus -?32768")
MOST_WORK_OF_VALUES = 2**19
# Loads and stores of interpreted programs, of which a thousand take 0.2 s.
MOST_ACCESSES = 3000
MOST_ACCESSES_OF_VALUES = 300  # of a case that is tried many times
MOST_ACCESSES_OF_POWERS = 300
MOST_ELEMENTS_OF_POWERS = 2**17
RESERVE = 9000  # beyond these, of all lengths together that the code names
ELEMENT_SLACK = 8.0  # times the largest usual error of an element, in long rows of 16 bits
EPSILON = 1e-2  # a parameter below it may be one, which is seen when it is far larger
LARGEST_WHOLE = 1025  # for a parameter that is a whole number
MOST_WORK = 2**25  # elements that the reference of a case may write
OPERATION = 2**14  # elements that take as long as a call of torch
_COUNTS: WeakKeyDictionary[Op, dict[tuple[str, torch.dtype], int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Point:
    """A case, with changed values or not. check: that it belongs to; text: what is at a boundary,
    in words; of_elements: as `compare` takes it; axes: that have another length than in the case
    ``base``; reserved: whether its accesses are taken from `RESERVE`."""

    check: str
    text: str
    case: OpCase
    painted: Painted | None = None
    of_elements: float | None = None
    axes: tuple[str, ...] = ()
    base: OpCase | None = None
    reserved: bool = False

    @property
    def declared(self) -> bool:
        """Whether the op declares the case."""
        return self.check not in (SIZES, VALUES, UPSTREAM, EMPTY)

    @property
    def parameter(self) -> bool:
        """Whether no declared case has its parameters."""
        op, params = self.case.op, self.case.case.params
        declared = ({**op.params, **case.params} for case in op.cases)
        return {**op.params, **params} not in declared

    def inputs(self, candidate: Candidate) -> Inputs:
        return self.painted.inputs if self.painted else candidate.inputs(self.case)


def size_points(candidate: Candidate, budget: "Budget") -> Iterator[Point]:
    """Lengths of axes, with what depends on them, from few elements to many."""
    base = candidate.general()
    turns = thresholds(candidate.provider.call)
    axes = [axis for axis, size in base.case.dims.items() if isinstance(size, int)]

    def at(case: OpCase, *names: str, length: int, most: float = MOST_ACCESSES) -> Iterator[Point]:
        """The case with axes of this length, if it is taken and costs little."""
        sized: OpCase | None = case
        for axis in names:
            sized = sized and candidate.resized(sized, axis, length)
        if sized:
            point = Point(SIZES, "", sized, axes=names, base=case)
            if budget.accesses(point) <= most and _allowed(candidate, sized):
                yield point
            else:
                budget.left_out += 1

    lengths = sorted({*LENGTHS, *turns, *(turn + 1 for turn in turns)})
    for length, axis in itertools.product(lengths, axes):
        for point in at(base, axis, length=length):
            yield point
            for varied in _varied(candidate, point.case, length):
                bound = None if varied.dtype is base.dtype else ELEMENT_SLACK
                text = varied.layout_text
                other = replace(point, text=text, case=varied, of_elements=bound)
                if budget.accesses(other) <= MOST_ACCESSES:
                    yield other
    several = [(pair, BOTH) for pair in itertools.combinations(axes, 2)]
    for turn in (turn + more for turn in turns for more in (0, 3)):
        several += [(pair, turn) for pair in itertools.combinations(axes, 2)]
    groups: list[tuple[Sequence[str], int]] = [*several, *([(axes, ALL)] if len(axes) > 2 else [])]
    for group, length in groups:
        yield from at(base, *group, length=length)
    if budget.usual(base) <= MOST_ACCESSES:
        others = [c for c in candidate.plain_cases() if _computed_otherwise(c, base)]
        for other_case in others[:OTHER_CASES]:
            for axis, now in other_case.case.dims.items():
                for length in (VARIED_LENGTH, *turns) if isinstance(now, int) and now > 1 else ():
                    yield from at(other_case, axis, length=length, most=math.inf)
        yield from (Point(SIZES, "", case) for case in _lists(candidate, base))
    short = {axis: _shortened(candidate, base, axis) for axis in axes}
    for length, axis in itertools.product(sorted({*POWERS} - {*lengths}), axes):
        for point in at(short[axis], axis, length=length, most=MOST_ACCESSES_OF_POWERS):
            if elements(candidate.op, point.case.case) <= MOST_ELEMENTS_OF_POWERS:
                yield point
    before = budget.left_out  # these were left out above
    for length, axis in itertools.product([turn + more for more in (1, 0) for turn in turns], axes):
        if length not in budget.tried[axis]:
            points = at(short[axis], axis, length=length, most=budget.reserve)
            yield from (replace(point, reserved=True) for point in points)
    for length, axis in itertools.product(sorted({*POWERS, *lengths}, reverse=True), axes):
        if LONG_ENOUGH >= length > max(budget.tried[axis], default=0):
            yield from at(short[axis], axis, length=length)
    budget.left_out = before


def _shortened(candidate: Candidate, base: OpCase, axis: str) -> OpCase:
    """The case with every other axis as short as results still tell something."""
    short = base
    for other, now in base.case.dims.items():
        if other != axis and isinstance(now, int):
            sizes = range(1, min(now, LONGEST_SHORT + 1))
            cases = (candidate.resized(short, other, size) for size in sizes)
            short = next((case for case in cases if case and _tells(candidate, case)), short)
    return short


def _tells(candidate: Candidate, case: OpCase) -> bool:
    try:
        return candidate.tells(case)
    except Exception:  # the reference does not take these sizes
        return False


def _allowed(candidate: Candidate, case: OpCase, most: int = MOST_WORK) -> bool:
    op = candidate.op
    return elements(op, case.case) <= most / 4 and work_of(op, case.case, case.dtype) <= most


def _varied(candidate: Candidate, case: OpCase, length: int) -> Iterator[OpCase]:
    """The case with what is tried at a length beside the usual values."""
    op = candidate.op
    upstream = bool(op.differentiable)
    layouts = {1: [SINGLE], LAYOUT_LENGTH: ["distinct", "transposed"]}.get(length, [])
    for layout in layouts:
        yield replace(case, layout=layout, upstream=layout if upstream else "contiguous")
    if length == VARIED_LENGTH:
        for extreme in op.extremes:
            yield replace(case, extreme=extreme)
        if upstream:
            yield replace(case, wanted=())
        for name in op.differentiable if len(op.differentiable) > 1 else ():
            yield replace(case, wanted=(name,))
        for name, numbers in settings(candidate, case).items():
            yield from (with_params(case, {name: number}) for number in numbers[:2])
    for dtype in candidate.dtypes if length in OF_DTYPES else ():
        of_dtype = replace(case, dtype=dtype)
        if dtype is not case.dtype and not of_dtype.unsupported():
            yield of_dtype


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
    changed = case.case.resized()  # a copy
    changed.params = {**changed.params, **params}
    return replace(case, case=changed)


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


def value_points(candidate: Candidate, budget: "Budget") -> Iterator[Point]:
    """Parameters and changed values of the general case, then in long rows, in other cases and in
    other dtypes."""
    base, op = candidate.general(), candidate.op
    if budget.usual(base) > MOST_ACCESSES:
        budget.left_out += 1
        return

    def values(case: OpCase | None, only: str = "") -> Iterator[Point]:
        if case is not None:
            for change in painted(candidate, case, only):
                yield Point(VALUES, change.text, case, change)

    def small(cases: Iterable[OpCase]) -> OpCase | None:
        """The first that costs little."""
        cheap = (case for case in cases if _allowed(candidate, case, MOST_WORK_OF_VALUES))
        most = MOST_ACCESSES_OF_VALUES
        return next((case for case in cheap if accesses_of(candidate, case) <= most), None)

    numbers_by_name = settings(candidate, base)
    changes = [{name: number} for name, numbers in numbers_by_name.items() for number in numbers]
    changes += [
        {first: number, second: other_number}
        for first, second in itertools.combinations(numbers_by_name, 2)
        for number in numbers_by_name[first][:2]
        for other_number in numbers_by_name[second][:2]
    ]
    for params in changes:
        text = ", ".join(f"{name} = {value!r}" for name, value in params.items())
        yield Point(VALUES, text, with_params(base, params))
    yield from values(base)
    for name, numbers in numbers_by_name.items():
        if 0.0 in numbers and type(op.params.get(name)) is float:  # as an epsilon of none
            case = with_params(base, {name: 0.0})
            for change in painted(candidate, case, "range"):
                if BESIDE_ZERO.search(change.text):
                    text = f"{name} = 0.0, {change.text}"
                    yield Point(VALUES, text, case, change)
    for axis in [axis for axis, size in base.case.dims.items() if isinstance(size, int)]:
        yield from values(_long(candidate, base, axis), "places")
    for dtype in candidate.dtypes:
        cases = [case for case in candidate.plain_cases() if case.dtype is dtype]
        if dtype is base.dtype:
            yield from values(small(case for case in cases if case.case is not base.case), "places")
        else:
            yield from values(small(reversed(cases)), "range")


def _long(candidate: Candidate, base: OpCase, axis: str) -> OpCase | None:
    """The case with the longest axis of `LONG` that costs little."""
    longest = None
    for length in LONG:
        case = candidate.resized(base, axis, length)
        if not case or not _allowed(candidate, case, MOST_WORK_OF_VALUES):
            break
        accesses = accesses_of(candidate, case)
        longest = case if accesses <= MOST_ACCESSES_OF_VALUES else longest
        if 2 * accesses > MOST_ACCESSES_OF_VALUES:  # the next one is twice as long
            break
    return longest


def upstream_points(candidate: Candidate, budget: "Budget") -> Iterator[Point]:
    """Changed upstream gradients, in float16 also with a loss scale."""
    case = candidate.telling()
    for change in painted_upstream(candidate, case):
        yield Point(UPSTREAM, change.text, case, change)
    halves = (c for c in candidate.plain_cases() if c.dtype is torch.float16 and candidate.tells(c))
    for case in itertools.islice(halves, 1):
        for change in painted_upstream(candidate, case, loss_scale=True):
            yield Point(UPSTREAM, change.text, case, change)


def empty_points(candidate: Candidate, budget: "Budget") -> Iterator[Point]:
    """The smallest case, where an axis has no entry: first one of the rows."""
    case = candidate.smallest()
    axes = [axis for axis, size in case.case.dims.items() if isinstance(size, int)]
    for axis in sorted(axes, key=lambda axis: axis not in rows(candidate)):
        empty = replace(case, case=case.case.resized(**{axis: 0}))
        if not _indexes(case, empty):
            yield Point(EMPTY, f"where {axis} is 0", empty)


def rows(candidate: Candidate) -> set[str]:
    """The axes of the rows of outputs and of inputs."""
    sides = candidate.op.outputs.values(), candidate.op.inputs.values()
    return {next((t.axes[0] for t in side if t.axes), "") for side in sides} - {""}


def _indexes(case: OpCase, empty: OpCase) -> bool:
    """Whether integers are drawn from a range that the empty axis gives: none is valid there."""
    for declared in case.op.inputs.values():
        drawn = {declared.distribution(c.case.dims).name for c in (case, empty)}
        entries = all(map(math.prod, shapes_of(declared, empty.case.dims)))
        if entries and not declared.floating and len(drawn) > 1:
            return True
    return False


class _Enough(Exception):  # noqa: N818 (an answer, not an error)
    """More is written than any case may."""


class _Written(DispatchMode):
    """Counts the elements of all results; each operation counts as `OPERATION` more."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        self.elements += OPERATION + sum(x.numel() for x in tensors)
        if self.elements > MOST_WORK:
            raise _Enough
        return result


def work_of(op: Op, case: Case, dtype: torch.dtype) -> int:
    """The elements that the op's reference writes in the forward pass of a case, or those of its
    inputs where it does not run without data, as where it asks for a value."""
    counts = _COUNTS.setdefault(op, {})
    key = str(case), dtype
    if key not in counts:
        args, written = without_values(op, case, dtype), _Written()
        try:
            with torch.no_grad(), written:
                op["eager"].call(*args, **{**op.params, **case.params})
        except _Enough:
            pass
        except Exception:  # it needs values
            written.elements = elements(op, case)
        counts[key] = written.elements
    return counts[key]


def accesses_of(candidate: Candidate, case: OpCase) -> int:
    """The loads and stores of all interpreted programs of a call; 0 where none is interpreted."""
    guards = GuardedMemory()
    with contextlib.suppress(Exception):
        candidate.results(candidate.inputs(case), guards=guards)
    return guards.accesses


class Budget:
    """What the points of a search cost. The accesses of a case are predicted: along each axis they
    are in proportion to its length, by the longest that was tried, and no fewer than usual.

    tried: the lengths of each axis; left_out: how many points cost too much; reserve: what is left
    of `RESERVE`."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate, self.left_out, self.reserve = candidate, 0, RESERVE
        self.tried: defaultdict[str, set[int]] = defaultdict(set)
        self._usual: dict[str, int] = {}
        self._longest: dict[tuple[str, str], tuple[int, int]] = {}

    def usual(self, base: OpCase) -> int:
        """The accesses of a case whose lengths are then changed."""
        if str(base) not in self._usual:
            self._usual[str(base)] = accesses_of(self.candidate, base)
        return self._usual[str(base)]

    def add(self, point: Point, accesses: int) -> None:
        """Take what a point cost into account."""
        dims = point.case.case.dims
        for axis in point.axes:
            self.tried[axis].add(dims[axis])
        if point.reserved:
            self.reserve -= accesses
        if len(point.axes) == 1 and not point.case.varied:
            (axis,) = point.axes
            if dims[axis] > self._longest_of(point, axis)[0]:
                self._longest[str(point.base), axis] = dims[axis], accesses

    def _longest_of(self, point: Point, axis: str) -> tuple[int, int]:
        """The longest length that was tried, and the accesses there."""
        assert point.base is not None
        first = point.base.case.dims[axis], self.usual(point.base)
        return self._longest.get((str(point.base), axis), first)

    def accesses(self, point: Point) -> float:
        """Those of the programs of a point, as predicted."""
        assert point.base is not None
        usual, factor = self.usual(point.base), 1.0
        for axis in point.axes:
            length, accesses = self._longest_of(point, axis)
            grown = accesses / max(1, usual) * point.case.case.dims[axis] / length
            factor *= max(1.0, grown)
        return usual * factor

    def text(self) -> str:
        """The longest length that was tried of each axis, and how many points were left out."""
        longest = [f"{axis} {max(lengths):,}" for axis, lengths in self.tried.items() if lengths]
        parts = [f"up to {', '.join(longest)}"] if longest else []
        if self.left_out:
            parts.append(f"{self.left_out} more were left out, since they take long")
        return "; ".join(parts)
