"""Parameters that are not the default ones: one at a time, and two at once."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import apart, norm_of_finite
from tinyllama.harness.check.evaluate import evaluate, mutated_results
from tinyllama.harness.check.finding import Candidate

FACTORS = (0.5, 3.0, 1e3, 1e6)  # of a parameter, the first that a result depends on
STEPS = (1, -1, 2)  # likewise, added to one that is a whole number
SEEN = 0.05  # of the norm of a result: the least by which it is to depend on a parameter


def settings(candidate: Candidate, case: OpCase) -> Iterator[tuple[str, Any]]:
    """Each parameter that is a number, with another allowed value that changes a result of the
    reference, and with one beside the default, if the case has another; each that is true or false,
    with the opposite."""
    inputs = candidate.inputs(case).double()
    reference = candidate.op["eager"].call
    known = evaluate(candidate.op, reference, inputs)
    before = mutated_results(candidate.op, inputs.args)

    def seen(name: str, others: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        for other in others:
            params = {**inputs.params, name: other}
            if candidate.op.misfit(case.case.dims, params) is not None:
                continue
            try:
                results = evaluate(candidate.op, reference, replace(inputs, params=params))
            except Exception:  # the reference does not take it
                continue
            if any(_moved(results[name], one, before.get(name)) for name, one in known.items()):
                yield name, other
                return

    for name, value in inputs.params.items():
        if type(value) is bool:
            yield name, not value
        elif type(value) is float:
            yield from seen(name, [value * factor for factor in FACTORS] if value else (0.5,))
        elif type(value) is int:
            taken = (one.flatten() for one in inputs.args.values() if _whole(one))
            drawn = (one[place].item() for one in taken for place in (0, -1))
            # One of them may be left out.
            yield from seen(name, (*(value + step for step in STEPS), *drawn))
            usual = candidate.op.params.get(name, value)
            if usual != value:  # a shift of 0 moves nothing: cases may have one to the left alone
                yield from seen(name, [usual + step for step in STEPS])


def _moved(result: torch.Tensor, known: torch.Tensor, before: torch.Tensor | None = None) -> bool:
    """A shape may depend on a parameter, too. before: what a call changes in place, of which the
    change counts: a step of an optimizer is small beside its parameters."""
    if result.shape != known.shape:
        return True
    own = known if before is None else apart(known, before)
    return bool(apart(result, known).norm() > SEEN * norm_of_finite(own))


def _whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.numel() > 0


def of_several(candidate: Candidate, case: OpCase) -> Iterator[Mapping[str, Any]]:
    """Each of `settings` alone, then each two of them at once that the reference takes: code for
    one of them may forget the other."""
    each = list(settings(candidate, case))
    yield from ({name: value} for name, value in each)
    inputs = candidate.inputs(case).double()
    for pair in itertools.combinations(each, 2):
        if pair[0][0] == pair[1][0]:  # two values of one
            continue
        params = {**inputs.params, **dict(pair)}
        if candidate.op.misfit(case.case.dims, params) is not None:
            continue
        try:
            evaluate(candidate.op, candidate.op["eager"].call, replace(inputs, params=params))
        except Exception:  # the reference takes each alone
            continue
        yield dict(pair)
