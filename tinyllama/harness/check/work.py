"""How much a case costs, counted and not timed, so that every machine tries the same points: the
elements that the reference writes, found on tensors without data, and the accesses of programs."""

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from tinyllama.harness.check.evaluate import shapes_of, without_values
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.machine.modes import DispatchMode

MOST_WORK = 2**25  # elements that the reference of a case may write
OPERATION = 2**14  # elements that take as long as a call of torch
_COUNTS: WeakKeyDictionary[Op, dict[tuple[str, torch.dtype], int]] = WeakKeyDictionary()


class _Enough(Exception):  # noqa: N818 (an answer, not an error)
    """More is written than any case may."""


class _Written(DispatchMode):
    """Counts the elements of all results; each operation counts as one more at least."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements += OPERATION
        self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        if self.elements > MOST_WORK:
            raise _Enough
        return result


def work_of(op: Op, case: Case, dtype: torch.dtype) -> int:
    """The elements that the op's reference writes in the forward pass of a case, or those of its
    inputs where it does not run without data, as where it asks for a value."""
    counts = _COUNTS.setdefault(op, {})
    key = str(case), dtype
    if key not in counts:
        counts[key] = _counted(op, case, dtype)
    return counts[key]


def _counted(op: Op, case: Case, dtype: torch.dtype) -> int:
    args, written = without_values(op, case, dtype), _Written()
    try:
        with torch.no_grad(), written:
            op["eager"].call(*args, **{**op.params, **case.params})
    except _Enough:
        pass
    except Exception:  # it needs values
        written.elements = sum(
            math.prod(shape) for i in op.inputs.values() for shape in shapes_of(i, case.dims)
        )
    return written.elements


class Growth:
    """Predicts the accesses of interpreted programs at a length from those at shorter ones.

    usual: those of the general case; the others are of longer ones.
    """

    def __init__(self, length: int, usual: int) -> None:
        self.counts = [(length, usual)]

    def add(self, length: int, accesses: int) -> None:
        if length > self.counts[-1][0]:
            self.counts.append((length, accesses))

    def times(self, length: int) -> float:
        """So many times as many accesses as usual; 1 where none were counted."""
        last, accesses = self.counts[-1]
        if length <= self.counts[0][0] or not accesses:
            return 1.0
        power = 1.0
        for shorter, fewer in self.counts[:-1]:
            if fewer and 2 * shorter <= last:
                power = max(0.0, math.log(accesses / fewer) / math.log(last / shorter))
        return accesses / max(1, self.counts[0][1]) * (length / last) ** power
