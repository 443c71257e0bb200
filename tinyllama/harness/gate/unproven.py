"""A provider that cannot be timed on this device: its results are held to the reference instead.

Kernels of Triton are interpreted on a CPU, where their time says nothing and their results do.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase, elements, op_cases
from tinyllama.harness.check.evaluate import ContractError, Inputs, evaluate
from tinyllama.harness.check.judge import faults, run_case
from tinyllama.harness.gate.benchmarks import layouts_of
from tinyllama.harness.gate.timed_call import tensors_of
from tinyllama.harness.gate.verification import Proof, digest, proofs_of
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.op_contender import Timed, ops_of
from tinyllama.harness.measure.right_results import WrongResultError, require_right

Results = Mapping[str, torch.Tensor]
MOST_ELEMENTS = 2**14  # of the inputs of a case that is tried: interpreting takes long


class _InterpretedError(BaseException):
    """Ends a call in the kernel that it launches, also where that call catches each Exception."""


def interpreted_kernel(call: Callable[[], object], device: torch.device) -> str:
    """Make a call, and return the name of an interpreted kernel that it launches, at which the call
    ends: interpreting a large case takes minutes. Empty if it launches none, as on a GPU."""
    kernels: list[str] = []

    def end(*_: Any) -> None:
        from tinyllama.harness.kernels import interpreter

        kernels.append(interpreter.running()[0].kernel)
        raise _InterpretedError

    if not HAS_TRITON or device.type != "cpu":
        call()
        return ""
    try:
        with watched(end):
            call()
    except (_InterpretedError, Exception):
        if not kernels:
            raise
    return kernels[0] if kernels else ""


class Untimed:
    """A provider on its small declared cases, and its first one on each layout of the op. Raises
    ValueError where it cannot run here.

    layout: of `Timed`; one that is not contiguous is the only one that is tried.
    """

    def __init__(self, timed: Timed, device: str, package: str, files: tuple[str, ...]) -> None:
        op = ops_of(package, files)[timed.op]
        self.candidate = Candidate(op, op[timed.provider], torch.device(device))
        self.layout = timed.layout
        missing = (cannot(need, self.candidate.device) for need in self.candidate.provider.requires)
        if reason := next(filter(None, missing), None):
            raise ValueError(f"it can be neither timed nor verified here: {reason}")

    def input_digest(self) -> int:
        """0: each case has its own (`Proof.inputs`), so that a change may add a case."""
        return 0

    def verify(self, seed: int) -> dict[str, Proof]:
        """Hold the results of each case, on inputs from a seed, to the reference, on memory that is
        guarded; returns the proofs by case and result. Raises WrongResultError, and what a call
        raises."""
        return self._proofs(seed, self._results)

    def reference(self, seed: int) -> dict[str, Proof]:
        """What the reference gives for each case, on inputs from a seed."""
        eager = self.candidate.op["eager"].call
        return self._proofs(
            seed, lambda candidate, case, inputs: evaluate(candidate.op, eager, inputs)
        )

    @staticmethod
    def _results(candidate: Candidate, case: OpCase, inputs: Inputs) -> Results:
        run = run_case(candidate, inputs)
        if run.error and not isinstance(run.error, ContractError):
            raise run.error  # what was not computed, or cannot be interpreted, is not wrong
        if run.error or run.out_of_bounds:
            raise WrongResultError("it is wrong in one of two equal calls")
        return run.results

    def _proofs(
        self, seed: int, results_of: Callable[[Candidate, OpCase, Inputs], Results]
    ) -> dict[str, Proof]:
        candidate = replace(self.candidate, seed=seed)
        proofs: dict[str, Proof] = {}
        for case in self._cases():
            inputs = candidate.inputs(case)
            try:
                results = results_of(candidate, case, inputs)
                compared = require_right(case, results, inputs)
            except WrongResultError as error:
                messages = (f"{f.case}: {f.check}: {f.message}" for f in faults(candidate, case))
                raise WrongResultError(next(messages, f"{case}: {error}")) from error
            of_inputs = digest([*tensors_of(inputs)], sorted(inputs.params.items()))
            slack = candidate.provider.slack_in(case.dtype)
            proofs |= {
                f"{case}: {name}": replace(proof, inputs=of_inputs)
                for name, proof in proofs_of(results, compared, slack).items()
            }
        return proofs

    def _cases(self) -> list[OpCase]:
        op, name = self.candidate.op, self.candidate.provider.name
        cases = [
            case
            for case in op_cases([op], providers=[name])
            if not case.varied and case.unsupported() is None
        ]
        if not cases:
            raise ValueError(f"{op.name}-{name} covers none of its declared cases")
        smallest = min(elements(op, case.case) for case in cases)
        most = max(MOST_ELEMENTS, smallest)
        small = [case for case in cases if elements(op, case.case) <= most]
        first = [case for case in small if case.case is small[0].case]  # in each dtype
        further = layouts_of(op, self.candidate.provider)
        layouts = further if self.layout == "contiguous" else [self.layout]
        laid_out = [replace(case, layout=layout) for layout in layouts for case in first]
        return [*small, *laid_out] if self.layout == "contiguous" else laid_out
