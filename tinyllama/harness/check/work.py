"""How much a case costs, counted and not timed, so that every machine tries the same points: the
elements that the reference writes, found on tensors without data, and the accesses of programs."""

import contextlib
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.evaluate import without_values
from tinyllama.harness.check.finding import Candidate
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.machine.modes import DispatchMode

MOST_WORK = 2**25  # elements that the reference of a case may write
OPERATION = 2**14  # elements that take as long as a call of torch
_COUNTS: WeakKeyDictionary[Op, dict[tuple[str, torch.dtype], int]] = WeakKeyDictionary()


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
    """Predicts the accesses of the programs of a case: along each axis they grow as its length,
    from the longest that was tried."""

    def __init__(self, candidate: Candidate, base: OpCase) -> None:
        self.usual = accesses_of(candidate, base)
        self.longest = {a: (n, self.usual) for a, n in base.case.dims.items() if type(n) is int}

    def add(self, case: OpCase, axis: str, accesses: int) -> None:
        length = case.case.dims[axis]
        if length > self.longest[axis][0]:
            self.longest[axis] = length, accesses

    def accesses(self, case: OpCase, axes: tuple[str, ...]) -> float:
        usual = max(1, self.usual)
        factors = (
            accesses / usual * max(1.0, case.case.dims[axis] / length)
            for axis, (length, accesses) in self.longest.items()
            if axis in axes
        )
        return self.usual * math.prod(factors)
