"""What only shows among several programs: races, and their order."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import (
    NO_KERNELS,
    Candidate,
    Problem,
    Rank,
    Unsupported,
)
from tinyllama.harness.check.graph import same_bits
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.launch import identity
from tinyllama.harness.kernels.programs import NAMES, Order, ordered


class RaceDetector:
    """Notes the addresses that each program of a launch stores without an atomic.

    races: kernel -> what was seen, where two programs of a launch stored one address.
    places: file and line of these kernels.
    """

    def __init__(self) -> None:
        self.races: dict[str, str] = {}
        self.places: dict[str, str] = {}
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
        plain = np.asarray(addresses) & interpreter_values.ADDRESS
        wanted = plain[np.broadcast_to(accessed, np.shape(addresses))]
        self._stored.setdefault(program, []).append(wanted.ravel())
        return None

    def close(self) -> None:
        """Judge the last launch."""
        each = [np.unique(np.concatenate(stored)) for stored in self._stored.values()]
        if each:
            found, times = np.unique(np.concatenate(each), return_counts=True)
            shared = found[times > 1]
            if len(shared):
                first = [p for p, own in zip(self._stored, each, strict=True) if shared[0] in own]
                text = f"{len(shared)} addresses, the first one by programs {first[0]}, {first[1]}"
                code = self._launch.fn.__code__
                self.races.setdefault(identity(self._launch), text)
                self.places[identity(self._launch)] = f"{code.co_filename}:{code.co_firstlineno}"
        self._stored = {}


def races(candidate: Candidate) -> Problem:
    """No two programs of a launch store to one address without an atomic, in any plain case."""
    interpreted(candidate)
    for case in candidate.plain():
        if case.dtype is not candidate.dtypes[0]:
            continue
        stores = RaceDetector()
        with watched(stores.watch):
            candidate.shielded().results(candidate.inputs(case))
        stores.close()
        for kernel, seen in stores.races.items():
            if kernel not in candidate.provider.races:
                named = f"{kernel} ({stores.places[kernel]})"
                text = f"{named}: two programs of a launch store to {seen}"
                return case, f"{text}; where a lock or equal values make it right, declare races="
    return None


def program_order(candidate: Candidate) -> Problem:
    """Results are right in whatever order programs run, in any plain case; and they have equal
    bits where that is declared for GPUs, which is advice."""
    interpreted(candidate)
    launched: set[str] = set()
    advice: Problem = None  # a wrong result in a later order is worse
    for case in candidate.plain():
        if case.dtype is not candidate.dtypes[0]:
            continue
        inputs = candidate.inputs(case)
        references = case.references(inputs)
        usual: dict[str, torch.Tensor] | None = None
        for name in NAMES:
            order = Order(name, seed=candidate.seed)
            with ordered(order) as kernels:
                results = candidate.results(inputs)
            launched |= set(kernels)
            if wrong := candidate.wrong(case, results, inputs, references):
                kernel = _culprit(candidate, case, order, kernels)
                return case, f"{kernel}, programs {name}: {wrong[0]}"
            usual = usual or candidate.results(inputs)
            others = [one for one, value in results.items() if not same_bits(value, usual[one])]
            if others and not advice and "cuda" in candidate.provider.deterministic:
                kernel = _culprit(candidate, case, order, kernels, usual)
                text = f"{kernel}, programs {name}: other bits of {', '.join(others)}"
                advice = case, f"{text}; declare deterministic={{'cpu'}}", Rank.WARNING
    if not launched:
        raise Unsupported("it launches no kernel")
    return advice


def _culprit(
    candidate: Candidate,
    case: OpCase,
    order: Order,
    kernels: Mapping[str, str],
    usual: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """The first kernel whose programs alone need their order, or all; as `program_order` judges.

    usual: results whose bits are asked for.
    """
    inputs = candidate.inputs(case)
    for kernel in kernels:
        with ordered(replace(order, kernel=kernel)):
            results = candidate.results(inputs)
        if usual is None:
            found = bool(candidate.wrong(case, results, inputs))
        else:
            found = not all(same_bits(value, usual[name]) for name, value in results.items())
        if found:
            return f"{kernel} ({kernels[kernel]})"
    return " or ".join(f"{kernel} ({place})" for kernel, place in kernels.items())


def interpreted(candidate: Candidate) -> None:
    """Raises Unsupported where no kernel is interpreted."""
    if candidate.device.type != "cpu":
        raise Unsupported("it is seen where kernels of Triton's are interpreted: use --device cpu")
    if not candidate.interpreted:
        raise Unsupported(NO_KERNELS)
