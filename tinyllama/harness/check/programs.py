"""What only shows among several programs: races, and their order."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check.compare import same_bits
from tinyllama.harness.check.evaluate import Inputs
from tinyllama.harness.check.finding import NO_KERNELS, Candidate, Problem, Rank, Unsupported
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.launch import identity
from tinyllama.harness.kernels.programs import NAMES, Order, ordered

Results = dict[str, torch.Tensor]


class RaceDetector:
    """Notes the addresses that each program of a launch stores without an atomic.

    races: kernel -> what was seen, with its file and line, where two programs of a launch stored
    one address.
    """

    def __init__(self) -> None:
        self.races: dict[str, str] = {}
        self._launch: Any = None
        self._stored: dict[tuple[int, ...], list[Any]] = {}

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> Any:
        from tinyllama.harness.kernels import interpreter, interpreter_values

        if kind != "store":
            return None
        launch, program = interpreter.running()
        if launch is not self._launch:
            self.close()
            self._launch = launch
        in_storage = np.asarray(addresses) & interpreter_values.ADDRESS
        stored = in_storage[np.broadcast_to(accessed, np.shape(addresses))]
        self._stored.setdefault(program, []).append(stored.ravel())
        return None

    def close(self) -> None:
        """Judge the last launch."""
        stored = {program: np.unique(np.concatenate(a)) for program, a in self._stored.items()}
        self._stored = {}
        if not stored:
            return
        addresses, times = np.unique(np.concatenate([*stored.values()]), return_counts=True)
        shared = addresses[times > 1]
        if len(shared):
            first, second, *_ = (program for program, a in stored.items() if shared[0] in a)
            kernel, code = identity(self._launch), self._launch.fn.__code__
            text = f"{kernel} ({code.co_filename}:{code.co_firstlineno}): two programs of a launch "
            text += f"store to {len(shared)} addresses, the first one by programs {first}, {second}"
            self.races.setdefault(kernel, text)


def races(candidate: Candidate) -> Problem:
    """No two programs of a launch store to one address without an atomic, in any plain case."""
    interpreted(candidate)
    for case in candidate.plain_cases():
        if case.dtype is not candidate.dtypes[0]:
            continue
        stores, raised = RaceDetector(), None
        with watched(stores.watch):
            try:
                candidate.results(candidate.inputs(case), watched=False)
            except Exception as error:
                raised = error
        stores.close()
        for kernel, text in stores.races.items():
            if kernel not in candidate.provider.races:
                return case, f"{text}; where a lock or equal values make it right, declare races="
        if raised is not None:
            raise raised
    return None


def program_order(candidate: Candidate) -> Problem:
    """Results are right in whatever order programs run, in any plain case; and they have equal
    bits where that is declared for GPUs: else that is a warning."""
    interpreted(candidate)
    launched: set[str] = set()
    warning: Problem = None  # a wrong result in a later order is worse
    exact = "cuda" in candidate.provider.deterministic
    for case in candidate.plain_cases():
        if case.dtype is not candidate.dtypes[0]:
            continue
        inputs = candidate.inputs(case)
        references = case.references(inputs)
        in_order = candidate.results(inputs)

        def wrong(results: Results) -> str:
            compared = candidate.wrong(case, results, inputs, references)  # noqa: B023
            return str(compared[0]) if compared else ""

        def changed(results: Results) -> str:
            names = [n for n, value in results.items() if not same_bits(value, in_order[n])]  # noqa: B023
            return f"other bits of {', '.join(names)}" if names else ""

        for name in NAMES:
            order = Order(name, seed=candidate.seed)
            with ordered(order) as kernels:
                results = candidate.results(inputs)
            launched |= set(kernels)
            if said := wrong(results):
                kernel = _kernel_that_needs_order(candidate, inputs, order, kernels, wrong)
                return case, f"{kernel}, programs {name}: {said}"
            if exact and not warning and (said := changed(results)):
                kernel = _kernel_that_needs_order(candidate, inputs, order, kernels, changed)
                text = f"{kernel}, programs {name}: {said}; declare deterministic={{'cpu'}}"
                warning = case, text, Rank.WARNING
    if not launched:
        raise Unsupported("it launches no kernel")
    return warning


def _kernel_that_needs_order(
    candidate: Candidate,
    inputs: Inputs,
    order: Order,
    kernels: Mapping[str, str],
    fault: Callable[[Results], str],
) -> str:
    """The first kernel whose programs alone need their order, with its place; or all."""
    for kernel, place in kernels.items():
        with ordered(replace(order, kernel=kernel)):
            if fault(candidate.results(inputs)):
                return f"{kernel} ({place})"
    return " or ".join(f"{kernel} ({place})" for kernel, place in kernels.items())


def interpreted(candidate: Candidate) -> None:
    """Raises Unsupported where no kernel is interpreted."""
    if candidate.device.type != "cpu":
        raise Unsupported("it is seen where kernels of Triton's are interpreted: use --device cpu")
    if not candidate.interpreted:
        raise Unsupported(NO_KERNELS)
