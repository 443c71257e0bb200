"""What the first call with a shape keeps, when something was unusual about that call.

Tables and plans are made at the first call with a shape, and kept. They may then be what only that
call could use: in its dtype, in autocast's, or a tensor of inference mode, which autograd refuses.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import copied
from tinyllama.harness.check.finding import Candidate, Problem
from tinyllama.harness.check.graph import Graph
from tinyllama.harness.check.resizing import resized
from tinyllama.harness.check.state import default_dtype
from tinyllama.harness.declare.autograd import several

NARROW = torch.bfloat16
STATES = ("in inference mode", "under autocast", "with another default dtype", "in another dtype")
TURNED = "of another shape with as many elements"
MOST = 20  # shapes that are tried, some of which the reference may refuse
BEYOND = 1  # an axis gets at least so many entries more: a length that no other check tries


def first_calls(candidate: Candidate) -> Problem:
    """A call is right after an unusual first call of its shape: one in inference mode, under
    autocast and with another default dtype at once, and in another dtype. If it is wrong, each is
    tried alone, on a shape of its own, and named. So is it after a call of another shape with as
    many elements: a key may be their number."""
    shapes = _shapes(candidate, candidate.telling())
    together = [STATES[:3], (TURNED,)]
    if len(candidate.dtypes) > 1:
        together.insert(1, STATES[3:])
    for states in together:
        if (case := next(shapes, None)) is None or _wrong_after(candidate, case, states) is None:
            continue
        alone = [((state,), next(shapes, None)) for state in states]
        for named, one in ((), next(shapes, None)), *alone, (states, next(shapes, None)):
            if one is not None and (text := _wrong_after(candidate, one, named)) is not None:
                if not named:
                    return None  # such a shape is wrong in any case: `sizes` tells
                what = "" if named == (TURNED,) else "of this shape "
                return one, f"after a first call {what}{' and '.join(named)}: {text}"
    return None


def _shapes(candidate: Candidate, case: OpCase) -> Iterator[OpCase]:
    """Other sizes of each axis, as far as the op takes them; none of them twice."""
    for number in range(MOST):
        one = case
        for axis, size in case.case.dims.items():
            if isinstance(size, int):
                one = resized(candidate, one, axis, size + BEYOND + 2 * number) or one
        if one is case:
            return
        if candidate.takes(one):
            yield one


def _turned(candidate: Candidate, case: OpCase) -> OpCase:
    """With the sizes of two axes exchanged, so that each input which has one of them has both; or
    with the sizes of the first two that the op takes so. The case itself where there are none."""
    op, dims = candidate.op, case.case.dims
    axes = [axis for axis, size in dims.items() if isinstance(size, int)]
    for one, other in itertools.combinations(axes, 2):
        if dims[one] == dims[other]:
            continue
        sizes = {one: dims[other], other: dims[one]}
        turned = replace(case, case=case.case.resized(**sizes))
        fits = op.misfit(turned.case.dims, case.case.params) is None
        if fits and turned.unsupported() is None and candidate.takes(turned):
            return turned
    return case


def _wrong_after(candidate: Candidate, case: OpCase, states: tuple[str, ...]) -> str | None:
    """What is wrong with a call after one in these states, in words; "" for an error."""
    other = next((one for one in candidate.dtypes if one is not case.dtype), case.dtype)
    first = replace(case, dtype=other) if "in another dtype" in states else case
    if TURNED in states and (first := _turned(candidate, case)) is case:
        return None
    within: dict[str, contextlib.AbstractContextManager[Any]] = {
        "in inference mode": torch.inference_mode(),
        "under autocast": torch.autocast(candidate.device.type, NARROW),
        "with another default dtype": default_dtype(NARROW),
    }
    if states:
        inputs = candidate.inputs(first)
        args = [copied(value) for value in inputs.args.values()]
        with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
            for state in states:
                if state in within:
                    stack.enter_context(within[state])
            several(candidate.provider.call(*args, **inputs.params))
    inputs = candidate.inputs(case)
    try:
        graph = Graph(candidate, inputs)
        results = {name: value.detach() for name, value in graph.outputs.items()}
        if candidate.op.differentiable:
            results |= {f"grad {name}": one for name, one in graph.gradients().items()}
    except Exception as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    wrong = candidate.wrong(case, results, inputs)
    return str(wrong[0]) if wrong else None
