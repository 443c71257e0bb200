"""Each axis of a case in turn made 1, 2 and 3, and long, to sizes that no block divides and to one
that each block divides, as far as time allows.

What goes wrong only there: an axis of one entry, a tail that no declared case has, a last block
that is full, a second block, more programs than the 65,535 that some axes of a grid may have, an
index that is narrow, a buffer that is too short. Then each pair of axes is long at once: the second
tile of both.
"""

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.accuracy import ENDLESS, excused, faults
from tinyllama.harness.check.cases import WIDER, OpCase, elements
from tinyllama.harness.check.compare import Comparison
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.check.finding import (
    Candidate,
    Finding,
    Rank,
    Unsupported,
    others,
)
from tinyllama.harness.check.last_entries import last_entry, many
from tinyllama.harness.check.layouts import SINGLE
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.check.resizing import (
    MOST_ELEMENTS,
    SECONDS,
    draws_for,
    general,
    resized,
)
from tinyllama.harness.check.settings import of_several
from tinyllama.harness.check.thresholds import thresholds
from tinyllama.harness.declare.specs import Case, flat
from tinyllama.harness.declare.values import constant

# 1 to 3, where both ends of a row are near; then one between each two powers of two from 64 to
# 32,768, since kernels are chosen by the next one: beyond a block by 1 to 5, for other tails of
# vectors; an even number of whole blocks; an odd number of 8, 16 and 32, of which code may take
# two to be whole; and three whole blocks of 64 to 1,024, where a loop takes two in each turn.
SIZES = (
    *(1, 2, 3, 67, 72, 80, 96, 131, 192, 259, 384, 768, 770, 1024, 1025, 1536, 2051, 3072),
    *(4096, 4099, 8197, 16388, 65539),
)
BOTH = 131  # of two axes at once
ALL = 67  # of all of three or more axes at once
OF_EXTREMES = 259  # the size at which extreme values, and each gradient alone and none, are tried
OF_LAYOUTS = 1025  # the size at which other layouts are tried too: the second block of 1,024
LAYOUTS = ("distinct", "transposed")
# At which integers of 8 bits are the largest that are drawn: sums of products are not exact in
# float32.
OF_SUMS, BYTES = 2051, (torch.int8, torch.uint8)
FEW = 3  # of so many the time says nothing
ALIKE = 4.0  # times as far beyond a bound as another implementation
LOST = 8.0  # times the largest error of an element that is usual
OTHERS = 3  # cases beside the general one that are tried along their axes, at few sizes
LISTS = (1, 67, 131)  # lengths of lists of tensors
ENTRIES = (3, 1, 2)  # sizes of their tensors, in turn
WITH_NONE = (3, 0, 2)  # and with a tensor that has none
LEADING = ((), (5,), (2, 3), (2, 1, 3))  # axes in place of those that may be any number


def sizes(candidate: Candidate) -> Finding | str:
    """Results are right along each axis; the text says how far each was tried, and why no further.

    Raises Unsupported where no axis can be any longer.
    """
    base = general(candidate)
    usual = candidate
    slack = {dtype: WIDER * candidate.provider.slack_in(dtype) for dtype in candidate.dtypes}
    candidate = replace(candidate, provider=replace(candidate.provider, slack=slack))
    apart = [one for one in _varied(candidate, base) if next(_faults(candidate, one), None)]
    said, reached, refused = [], False, None
    long: list[str] = []  # axes that take more than one entry
    for axis in base.case.dims:
        found = _along(candidate, base, axis, [_variation(one) for one in apart])
        if not isinstance(found, Finding):
            found = _in_others(usual, base, axis, found[0]) or found
        if isinstance(found, Finding) and found.rank is not Rank.REFUSED:
            return found
        if isinstance(found, Finding):
            refused = refused or found  # a wrong result along another axis is worse
            continue
        size, why = found
        reached = reached or size > 0
        if size >= BOTH:
            long.append(axis)
        said.append(f"{axis} up to {size:,}{why}" if size else f"{axis} not tried{why}")
    if refused is not None:
        return _lists(candidate, base) or refused
    if not reached:
        if (fault := _lists(candidate, base)) is not None:
            return fault
        raise Unsupported("; ".join(said))
    if (fault := _lists(candidate, base)) is not None:
        return fault
    both = _together(candidate, base, long)
    if isinstance(both, Finding):
        return both
    last = many(candidate, base)
    if isinstance(last, Finding):
        return last
    return _elsewhere(candidate, base) or "; ".join([*said, *last, *both])


def _together(candidate: Candidate, base: OpCase, axes: list[str]) -> Finding | list[str]:
    """What is wrong where two axes, or all, are long at once; else which were left out, and why."""
    started = time.thread_time()
    left: dict[str, None] = {}
    sizes = [
        BOTH,
        *(size for one in thresholds(candidate.provider.call) for size in (one, one + 3)),
    ]
    groups: list[tuple[tuple[str, ...], int]]
    groups = [(pair, size) for size in sizes for pair in itertools.combinations(axes, 2)]
    groups += [(tuple(axes), ALL)] if len(axes) > 2 else []
    for group, size in groups:
        case: OpCase | None = base
        for axis in group:
            case = case and resized(candidate, case, axis, size)
        if case is None or elements(candidate.op, case.case) > MOST_ELEMENTS:
            continue
        if time.thread_time() - started > SECONDS:
            left[" and ".join(group)] = None
        elif (fault := _at_once(candidate, case)) is not None:
            return fault
    return [f"not at once, for lack of time: {', '.join(left)}"] if left else []


def _elsewhere(candidate: Candidate, base: OpCase) -> Finding | None:
    """What is wrong where an axis of another case is long, one with an axis of one entry or with
    other parameters: it may be computed in another way, which also depends on a length."""
    started = time.thread_time()
    sizes = (OF_EXTREMES, *thresholds(candidate.provider.call))
    for other in [one for one in candidate.plain() if _is_apart(one, base)][:OTHERS]:
        for axis, now in other.case.dims.items():
            for size in sizes if isinstance(now, int) and now > 1 else ():
                case = resized(candidate, other, axis, size)
                if case is None or elements(candidate.op, case.case) > MOST_ELEMENTS:
                    continue
                if time.thread_time() - started > SECONDS:
                    return None
                if (fault := _at_once(candidate, case)) is not None:
                    return fault
    return None


def _is_apart(case: OpCase, base: OpCase) -> bool:
    single = any(size == 1 != base.case.dims[axis] for axis, size in case.case.dims.items())
    return case.dtype is base.dtype and (single or case.case.params != base.case.params)


def _at_once(candidate: Candidate, case: OpCase) -> Finding | None:
    """What is wrong in a case, where the reference takes it; it may be refused."""
    if not candidate.takes(case):
        return None
    fault = next(faults(candidate, case, refusable=True), None)
    if fault is None or ENDLESS in fault.message or fault.rank is Rank.REFUSED:
        return None
    if fault.rank is Rank.WRONG and _alike(candidate, case):
        return None
    text = f"{fault.check}: {fault.message}"
    return replace(fault, check="sizes", message=text, special=fault.rank)


def _lists(candidate: Candidate, base: OpCase) -> Finding | None:
    """What is wrong with lists of other lengths: a launch takes so many tensors, and no more; with
    an empty tensor among others; and with other numbers of leading axes."""
    for axis, size in base.case.dims.items():
        if not isinstance(size, tuple) or not any(
            one.many and axis in one.axes for one in candidate.op.inputs.values()
        ):
            continue
        lists = [tuple(itertools.islice(itertools.cycle(ENTRIES), count)) for count in LISTS]
        for sizes in (*lists, WITH_NONE):
            case = replace(base, case=base.case.resized(**{axis: sizes}))
            if case.unsupported() is not None or (sizes is WITH_NONE and not candidate.takes(case)):
                continue
            for fault in _faults(candidate, case):
                if sizes is WITH_NONE and fault.rank is Rank.REFUSED:
                    break
                some = "one of them empty" if sizes is WITH_NONE else f"{len(sizes)} tensors"
                text = f"{fault.check}: lists of {len(sizes)}: {fault.message}"
                found = replace(fault, check="sizes", message=text, special=fault.rank)
                return replace(found, case=f"{candidate.provider}-{some}")
    for axis in candidate.op.leading[:1]:
        for several in LEADING:
            case = replace(base, case=base.case.resized(**{axis: several}))
            if case.unsupported() is None and (wrong := _at_once(candidate, case)) is not None:
                return wrong
    return None


def _varied(candidate: Candidate, case: OpCase, size: int = 0) -> Iterator[OpCase]:
    """The case with each variation that is tried at a size; with all of them for 0."""
    differentiable = candidate.op.differentiable
    if size in (0, OF_EXTREMES) and differentiable:
        yield replace(case, wanted=())
        for name in differentiable if len(differentiable) > 1 else ():
            yield replace(case, wanted=(name,))
    if size in (0, OF_EXTREMES):
        for params in of_several(candidate, case):
            given = {**case.case.params, **params}
            sizes = case.case.dims
            made = Case(why=case.case.why, params=given, values=case.case.values, **sizes)
            yield replace(case, case=made)
    if size in (0, 1):
        yield replace(case, layout=SINGLE, upstream=SINGLE if differentiable else "contiguous")
    of_bytes = [name for name, one in candidate.op.inputs.items() if one.dtype in BYTES]
    exact = not any(one.floating for one in candidate.op.outputs.values())
    if size in (0, OF_SUMS) and of_bytes and exact:
        values = {
            **case.case.values,
            **{n: constant(_most(draws_for(candidate, case, n))) for n in of_bytes},
        }
        made = Case(why=case.case.why, params=case.case.params, values=values, **case.case.dims)
        yield replace(case, case=made)
    if size in (0, OF_LAYOUTS):
        for layout in LAYOUTS:
            yield replace(case, layout=layout, upstream=layout if differentiable else "contiguous")


def _most(draws: list[torch.Tensor]) -> int:
    return max(int(one.max()) for one in draws)


def _variation(case: OpCase) -> tuple[Any, ...]:
    return case.wanted, case.layout, tuple(case.case.params), tuple(case.case.values)


def _faults(candidate: Candidate, case: OpCase) -> Iterator[Finding]:
    """What is wrong in a case, but for layouts that are refused, which another check is about."""
    with torch.no_grad() if case.wanted == () else contextlib.nullcontext():
        found = list(faults(candidate, case, refusable=True))
    for one in found:
        if case.layout == "contiguous" or one.rank is not Rank.REFUSED:
            yield one


def _in_others(candidate: Candidate, base: OpCase, axis: str, size: int) -> Finding | None:
    """What is wrong at this size of an axis in the other dtypes: sums that are rounded to them on
    the way, and code that is for one of them. Sums in float32 are exact by their measure, so the
    usual error is allowed. In a long row the norm of all roundings hides a few elements that are
    not there, so each element is held to a bound, too."""
    case = resized(candidate, base, axis, size) if size else None
    if case is None:
        return None
    for dtype in candidate.dtypes:
        one = replace(case, dtype=dtype)
        if dtype is base.dtype or one.unsupported():
            continue
        each = replace(candidate, of_elements=LOST)
        fault = next(faults(each, one, refusable=True), None)
        if fault is not None and fault.rank is Rank.WRONG and _alike(each, one):
            continue
        if fault is not None and ENDLESS not in fault.message:
            text = f"{fault.check}: {fault.message}"
            return replace(fault, check="sizes", message=text, special=fault.rank)
    return None


def _along(
    candidate: Candidate, base: OpCase, axis: str, apart: list[tuple[Any, ...]]
) -> Finding | tuple[int, str]:
    """What is wrong along an axis; else the largest size that was tried, and why no larger one.

    apart: variations that are wrong in the base, too."""
    largest, last, power = 0, 0.0, 1.0  # time grows with this power of the size
    decided = thresholds(candidate.provider.call)
    for size in sorted({*SIZES, *decided, *(one + 1 for one in decided)}):
        case = resized(candidate, base, axis, size)
        if case is None:
            return largest, f" ({size:,} is not supported)"
        if largest > FEW and last * (size / largest) ** power > SECONDS:
            beyond = last_entry(candidate, base, axis, largest, SIZES[-1])
            if isinstance(beyond, Finding):
                return beyond
            return largest, f" ({size:,} would take more than {SECONDS:.0f} s{beyond})"
        started = time.thread_time()
        try:
            inputs = candidate.inputs(case)
            evaluate(candidate.op, candidate.op["eager"].call, inputs)
        except Exception as error:
            if size <= FEW:  # a variance of one entry, say
                continue
            return largest, f" (the reference does not take {size:,}: {error})"
        extremes = candidate.op.extremes if size == OF_EXTREMES else ()
        varied = [one for one in _varied(candidate, case, size) if _variation(one) not in apart]
        every = [replace(case, extreme=extreme) for extreme in (None, *extremes)] + varied
        for one in every:
            fault = next(_faults(candidate, one), None)
            if one.extreme is not None and excused(candidate, one, fault):
                continue
            if fault is not None and fault.rank is Rank.WRONG and _alike(candidate, one):
                continue
            if fault is not None and ENDLESS in fault.message and largest:
                return largest, f" (programs would take too many operations at {size:,})"
            if fault is not None:
                text = f"{fault.check}: {fault.message}"
                return replace(fault, check="sizes", message=text, special=fault.rank)
        taken = (time.thread_time() - started) / len(every)
        now = max(flat([case.case.dims[axis]]))
        if largest > FEW and now > 2 * largest:
            power = max(1.0, math.log(taken / last, now / largest))
        largest, last = now, taken
    return largest, ""


def _alike(candidate: Candidate, case: OpCase) -> bool:
    """Whether torch's provider, or independent code, misses the bounds of each result that is wrong
    by about as much, in each norm: a long axis may make a case so sensitive that none is right."""
    inputs = candidate.inputs(case)
    try:
        wrong = candidate.wrong(case, candidate.results(inputs, PoisonedMemory()), inputs)
    except Exception:
        return False

    def misses(found: Iterable[Comparison]) -> dict[tuple[str, str], float]:
        missed = ((one.name, c) for one in found for c in one.checks if not c.passed)
        return {(name, c.norm): c.error / max(c.bound, sys.float_info.min) for name, c in missed}

    mine = misses(wrong)
    for results in others(candidate, inputs):
        theirs = misses(candidate.wrong(case, results, inputs))
        if mine and all(miss <= ALIKE * theirs.get(key, 0.0) for key, miss in mine.items()):
            return True
    return False
