"""A provider that is checked: its cases, and its results."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase, References, elements, op_cases
from tinyllama.harness.check.compare import SLACK, Comparison
from tinyllama.harness.check.evaluate import Inputs, copied, evaluate, leaves
from tinyllama.harness.check.finding import Rank
from tinyllama.harness.check.guards import GuardedMemory, PoisonedMemory
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.kernels.bounds import Bounds, watched
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.device import cannot, synchronize

NO_KERNELS = 'it launches no kernels of Triton\'s: else declare requires=("triton",)'
TRIES = 8  # following sizes that are tried where an op or a provider does not take one

# What a check finds: the case, what was seen, and its rank where that is a special one.
Problem = tuple[OpCase, str] | tuple[OpCase, str, Rank] | None


def worst(problems: Iterable[Problem]) -> Problem:
    """The first that is more than advice; else the first. What follows it is not looked for."""
    advice: Problem = None
    for problem in problems:
        if problem is not None and problem[2:] != (Rank.WARNING,):
            return problem
        advice = advice or problem
    return advice


class Unsupported(Exception):  # noqa: N818 (an answer, not an error)
    """Raised by a check that cannot be made here; the message is the reason."""


@dataclass(frozen=True)
class Candidate:
    """A provider of an op that is checked: on this device, with inputs from this seed.

    backend: of torch.compile, for the check `compiled`.
    announce: is told each case that is about to be tried.
    """

    op: Op
    provider: Provider
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    backend: str = "aot_eager"
    announce: Callable[[OpCase], None] = lambda case: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", self.provider.offered(self.op))

    @property
    def slack(self) -> dict[torch.dtype, float]:
        return {dtype: SLACK * self.provider.slack_in(dtype) for dtype in self.dtypes}

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in self.op.dtypes if dtype in self.provider.dtypes]

    def smallest(self, dtype: torch.dtype | None = None) -> OpCase:
        """The case with the fewest elements that the provider covers.

        Raises Unsupported when there is none.
        """
        for case in self.plain_cases():
            if dtype in (None, case.dtype):
                return case
        raise Unsupported(f"{self.provider} covers none of the cases")

    def telling(self) -> OpCase:
        """The smallest case that `tells`, or else the smallest of all. In the others a call that
        does nothing may be right."""
        return next(filter(self.tells, self.plain_cases()), None) or self.smallest()

    def tells(self, case: OpCase) -> bool:
        """Whether no output equals an input there, and no result of the reference is all zero."""
        inputs = self.inputs(case)
        results = self.reference_results(inputs)
        args = [value for value in leaves(inputs.args) if value.is_floating_point()]
        return all(
            bool(value.any())
            and not any(
                (value.shape, value.dtype) == (arg.shape, arg.dtype) and bool((value == arg).all())
                for arg in args
            )
            for value in results.values()
        )

    def covered(self) -> list[OpCase]:
        """The cases that the provider covers, plain ones from small to large, then varied ones."""
        covered = [case for case in self.declared() if case.unsupported() is None]
        return sorted(covered, key=lambda case: (case.varied, elements(self.op, case.case)))

    def declared(self) -> list[OpCase]:
        """Those of the op."""
        cases = op_cases([self.op], providers=["eager"], thorough=True)
        return [replace(case, provider=self.provider) for case in cases]

    def plain_cases(self) -> list[OpCase]:
        return [case for case in self.covered() if not case.varied]

    def inputs(self, case: OpCase, draw: int = 0) -> Inputs:
        """draw: another one gives other values."""
        self.announce(case)
        return case.inputs(self.device, self.seed + draw)

    def results(
        self,
        inputs: Inputs,
        memory: PoisonedMemory | None = None,
        guards: GuardedMemory | None = None,
        *,
        watched: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one call on copies of the inputs. guards: put everything between
        canaries. watched: whether a call that changes its inputs raises an error."""
        with contextlib.ExitStack() as within:
            if guards is not None:
                within.enter_context(self.limits(guards))
            for mode in filter(None, (memory, guards)):
                within.enter_context(mode)
            results = evaluate(
                self.op,
                self.provider.call,
                inputs,
                self.provider.overwrites,
                place=guards.placed if guards else lambda value, name: copied(value),
                dtypes=self.provider.output_dtypes,
                watched=watched,
            )
            synchronize(self.device)
            return results

    @contextlib.contextmanager
    def limits(self, bounds: Bounds) -> Iterator[None]:
        """Meanwhile, interpreted kernels access nothing out of bounds, and end; those of a provider
        that does not say that it has kernels, too."""
        if self.device.type != "cpu" or not HAS_TRITON:
            yield
            return
        from tinyllama.harness.kernels.interpreter import limited

        with watched(bounds.watch), limited():
            yield

    def wrong(
        self,
        case: OpCase,
        results: dict[str, torch.Tensor],
        inputs: Inputs,
        references: References | None = None,
    ) -> list[Comparison]:
        """The results that are not as accurate as the reference's. references: for these inputs, if
        several results are compared with them."""
        compared = case.judge(results, inputs, slack=self.slack[case.dtype], references=references)
        return [comparison for comparison in compared if not comparison.passed]

    def general(self) -> OpCase:
        """The case that the op declares first, if a wrong result shows there; it should be
        general."""
        first, dtype = self.op.cases[0], self.dtypes[0]
        cases = (case for case in self.plain_cases() if case.case is first and case.dtype is dtype)
        case = next(cases, None)
        return case if case is not None and self.tells(case) else self.telling()

    def resized(self, base: OpCase, axis: str, size: int) -> OpCase | None:
        """The case with about this size of an axis; None where op or provider takes none."""
        before = base.case.dims.get(axis)
        if before is None:  # a number, or computed from the sizes of others
            return None
        for more in range(TRIES):
            new: Any = (size + more, *before[1:]) if isinstance(before, tuple) else size + more
            case = replace(base, case=base.case.resized(**{axis: new}))
            fits = self.op.misfit(case.case.dims, case.case.params) is None
            if fits and case.unsupported() is None:
                return case
        return None

    def takes(self, case: OpCase) -> bool:
        """Whether the reference takes these sizes: an op may leave out what must fit."""
        try:
            self.reference_results(self.inputs(case))
        except Exception:
            return False
        return True

    @property
    def reference(self) -> "Candidate":
        """The reference in the place of the provider."""
        return replace(self, provider=self.op["eager"])

    def reference_results(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return evaluate(self.op, self.op["eager"].call, inputs)

    def with_kernels(self) -> "Candidate":
        """The same, which says that it has kernels where its smallest case launches one here."""
        if "triton" in self.provider.requires or self.device.type != "cpu" or not HAS_TRITON:
            return self
        bounds = Bounds()
        with contextlib.suppress(Exception), self.limits(bounds):
            self.results(self.inputs(self.smallest()))
        if not bounds.kernels:
            return self
        requires = (*self.provider.requires, "triton")
        return replace(self, provider=replace(self.provider, requires=requires))

    @property
    def interpreted(self) -> bool:
        """Whether its kernels are interpreted on this device."""
        return self.device.type == "cpu" and "triton" in self.provider.requires

    def missing(self) -> str | None:
        """Why the provider cannot run on the device; None when it can."""
        reasons = (cannot(need, self.device) for need in self.provider.requires)
        return next(filter(None, reasons), None)


def other_results(candidate: Candidate, inputs: Inputs) -> Iterator[dict[str, torch.Tensor]]:
    """Results of torch's provider and of independent code, as far as they take these inputs."""
    op = candidate.op
    of_torch = [provider.call for name, provider in op.providers.items() if name == "torch"]
    for call in (*of_torch, *op.independents.values()):
        try:
            results = evaluate(op, call, inputs)
        except Exception:  # it says nothing about such inputs
            continue
        yield results
