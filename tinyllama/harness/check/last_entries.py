"""The last entries of an axis that is too long for all of it to be run, or compared: an index that
is narrow is wrong there, and so is a count in float32.
"""

import math
import time

import torch

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import near
from tinyllama.harness.check.evaluate import evaluate, is_gradient, shapes_of
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, others
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.check.resizing import MOST_ELEMENTS, SECONDS, UNLIKE, resized
from tinyllama.harness.declare.op import Op

MANY = 2**24  # elements: float32 holds no larger odd number, so not every index beyond
UNLIKE_MANY = 0.03  # of the norm of the last entries: the largest difference that is allowed
ENDS = 64  # programs at each end of a launch, where all of them would take too long
NOISE = 0.2  # seconds by which the time of few programs differs


def last_entry(
    candidate: Candidate, base: OpCase, axis: str, tried: int, longest: int
) -> Finding | str:
    """What is wrong in the last entry of an axis of the longest size, of which only the first and
    the last programs of each launch are run; else what was seen, in words. It is asked where the
    programs at the ends make the last entry of a size that was tried, too, and of a quarter of it
    in about the same time: else one program would have too much to do.

    tried: that size. Results without this axis, which need all programs, are left out.
    """
    if not candidate.interpreted or candidate.op.mutated:
        return ""
    before = math.inf
    for size in (tried // 4, tried, longest):
        case = resized(candidate, base, axis, size)
        if case is None or elements(candidate.op, case.case) > 8 * MOST_ELEMENTS:
            return ""
        started = time.thread_time()
        try:
            wrong, most = _ends_differ(candidate, case, axis)
        except Exception as error:
            from tinyllama.harness.kernels.programs import GridError

            if isinstance(error, GridError):
                return Finding("sizes", Outcome.FAILED, str(case), str(error))
            return ""  # what was left out may be what others need
        taken = time.thread_time() - started
        if size <= tried and (wrong or ENDS * most < size or taken > 2 * before + NOISE):
            return ""
        before = taken
    if wrong:
        text = f"the last entry along {axis} of {', '.join(wrong)}"
        return Finding("sizes", Outcome.FAILED, str(case), f"{text} is wrong or never written")
    return f", but the last entry of {longest:,} is right"


def _ends_differ(candidate: Candidate, case: OpCase, axis: str) -> tuple[list[str], int]:
    """The results whose last entry along the axis is far from the reference's where programs at the
    ends alone are run; and the most programs of a launch."""
    from tinyllama.harness.kernels.programs import ends

    op, inputs = candidate.op, candidate.inputs(case)
    with ends(ENDS) as launched:
        results = candidate.results(inputs, PoisonedMemory())
    oracle = evaluate(op, op["eager"].call, inputs.double())
    return _end_differs(op, results, oracle, axis, 1, UNLIKE), launched.most


def many(candidate: Candidate, base: OpCase) -> Finding | list[str]:
    """Lengthen the first axis until an input has more than 2^24 elements, and compare its last
    entries: a Finding if they are wrong, else what was compared, in words, or nothing if it would
    take too long."""
    op, (axis, length) = candidate.op, next(iter(base.case.dims.items()))
    of_entry = [
        math.prod(shape) // length
        for declared in op.inputs.values()
        if axis in declared.axes and isinstance(length, int)
        for shape in shapes_of(declared, base.case.dims)
    ]
    if candidate.interpreted or op.mutated or not any(of_entry):
        return []
    size = MANY // max(of_entry) + ENDS
    for share in (64, 8, 1):  # to stop early: each takes about 8 times as long
        case = resized(candidate, base, axis, max(length, size // share))
        if case is None or elements(op, case.case) > 4 * MANY // share + MOST_ELEMENTS:
            return []
        started = time.thread_time()
        try:
            inputs = candidate.inputs(case)
            right = evaluate(op, op["eager"].call, inputs)
            results = candidate.results(inputs)
        except Exception:
            return []  # `sizes` reports sizes that are refused
        most = sum(value.numel() for value in results.values())
        taken = time.thread_time() - started
        if share > 1 and (8 * taken > SECONDS / 2 or share * most > 8 * MANY):
            return []
    each = [right, *others(candidate, inputs)]
    wrong = [_end_differs(op, results, one, axis, ENDS, UNLIKE_MANY) for one in each]
    if all(wrong):
        text = f"the last of {MANY:,} elements and more of {', '.join(wrong[0])} are wrong"
        return Finding("sizes", Outcome.FAILED, str(case), text)
    return [f"the last {ENDS} of {size:,} entries of {axis} are right"]


def _end_differs(
    op: Op,
    results: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    axis: str,
    entries: int,
    unlike: float,
) -> list[str]:
    """The results whose last entries along the axis differ by more than this share of their norm.
    Integers, and results without the axis, are left out."""
    wrong = []
    for name, value in right.items():
        axes = op.inputs[name[5:]].axes if is_gradient(name) else op.outputs[name].axes
        if axis in axes and value.is_floating_point() and value.dim() == len(axes):
            place = axes.index(axis)
            one, other = (
                x.narrow(place, x.shape[place] - entries, entries) for x in (results[name], value)
            )
            if not near(one, other, unlike):
                wrong.append(name)
    return wrong
