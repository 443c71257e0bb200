"""What a check is asked about, and what it answers."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from tinyllama.harness.correct.cases import OpCase, op_cases
from tinyllama.harness.correct.compare import SLACK, Comparison
from tinyllama.harness.correct.evaluate import Inputs, Leaves, evaluate
from tinyllama.harness.correct.poison import PoisonedMemory
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.machine.device import cannot


class Outcome(enum.Enum):
    """How a check ended.

    PASSED. FAILED: a result is wrong, which the check names. CRASHED: the candidate raised
    where it should not. UNSUPPORTED: the check cannot be made here, or the candidate says that it
    does not cover it. BLOCKED: another check, which comes first, has failed already.
    """

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    BLOCKED = "blocked"

    @property
    def good(self) -> bool:
        return self in (Outcome.PASSED, Outcome.UNSUPPORTED)


@dataclass(frozen=True)
class Finding:
    """The answer of one check. case: the smallest that shows it; message: what was seen."""

    check: str
    outcome: Outcome
    case: str = ""
    message: str = ""

    def as_dict(self) -> dict[str, str]:
        """As plain data, the outcome by its word."""
        return {**vars(self), "outcome": self.outcome.value}


Problem = tuple[OpCase, str] | None  # the case that shows it, and what was seen


class Unsupported(Exception):  # noqa: N818 (an answer, not an error)
    """Raised in a check: it cannot be made here, for this reason."""


@dataclass(frozen=True)
class Candidate:
    """A provider of an op on a device, whose inputs are drawn from a seed."""

    op: Op
    provider: Provider
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    @property
    def slack(self) -> dict[torch.dtype, float]:
        return {dtype: SLACK * self.provider.slack.get(dtype, 1.0) for dtype in self.dtypes}

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in self.op.dtypes if dtype in self.provider.dtypes]

    def smallest(self, dtype: torch.dtype | None = None) -> OpCase:
        """The case with the fewest elements that the provider covers.

        Raises Unsupported when there is none.
        """
        for case in self.plain():
            if dtype in (None, case.dtype):
                return case
        raise Unsupported(f"{self.provider} covers none of the cases")

    def covered(self) -> list[OpCase]:
        """The cases that the provider covers, plain ones from small to large, then varied ones."""
        made = [
            replace(case, provider=self.provider)
            for case in op_cases([self.op], providers=["eager"])
        ]
        covered = [case for case in made if case.unsupported() is None]
        return sorted(covered, key=lambda case: (case.varied, elements(self.op, case.case.dims)))

    def plain(self) -> list[OpCase]:
        return [case for case in self.covered() if not case.varied]

    def inputs(self, case: OpCase) -> Inputs:
        return case.inputs(self.device, self.seed)

    def results(
        self, inputs: Inputs, memory: PoisonedMemory | None = None
    ) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one call."""
        with memory or contextlib.nullcontext():
            return evaluate(self.op, self.provider.call, inputs, self.provider.overwrites)

    def wrong(
        self, case: OpCase, results: dict[str, torch.Tensor], inputs: Inputs
    ) -> list[Comparison]:
        """The results that are not as accurate as the reference's."""
        compared = case.judge(results, inputs, slack=self.slack[case.dtype])
        return [one for one in compared if not one.passed]

    @property
    def interpreted(self) -> bool:
        """Whether its kernels are interpreted on this device."""
        return self.device.type == "cpu" and "triton" in self.provider.requires

    def missing(self) -> str | None:
        """Why the provider cannot run on the device; None when it can."""
        return next(
            filter(None, (cannot(need, self.device) for need in self.provider.requires)), None
        )


def elements(op: Op, dims: object) -> int:
    """How many numbers the inputs of a case hold."""
    assert isinstance(dims, dict)
    total = 0
    for declared in op.inputs.values():
        size = 1
        for axis in declared.axes:
            value = dims[axis]
            size *= sum(value) if isinstance(value, tuple) else value
        total += size
    return total


def leaves(args: Leaves) -> Iterator[torch.Tensor]:
    """The tensors among arguments, those of lists too."""
    for value in args.values():
        yield from value if isinstance(value, list) else [value]
