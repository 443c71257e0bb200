"""What only shows among many programs: races, their order, and offsets past 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tinyllama.harness.correct.cases import OpCase, elements
from tinyllama.harness.correct.checks.finding import Candidate, Problem, Rank, Unsupported
from tinyllama.harness.correct.checks.graph import Graph, same_bits
from tinyllama.harness.correct.offsets import BF16, Far, NoAddressesError
from tinyllama.harness.declare.specs import Tensor
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.launch import identity
from tinyllama.harness.kernels.programs import NAMES, Order, ordered

APART = 3  # rows that lie 2^30 elements apart: the last one begins beyond 2^31


class Stores:
    """Notes the addresses that each program of a launch stores without an atomic.

    races: kernel -> what was seen, where two programs of a launch stored one address.
    """

    def __init__(self) -> None:
        self.races: dict[str, str] = {}
        self._launch: Any = None
        self._stored: dict[tuple[int, ...], list[Any]] = {}

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> Any:
        from tinyllama.harness.kernels import interpreter

        if kind != "store":
            return None
        launch, program = interpreter.running()
        if launch is not self._launch:
            self.close()
            self._launch = launch
        plain = np.asarray(addresses) & interpreter.ADDRESS
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
                self.races.setdefault(identity(self._launch), text)
        self._stored = {}


def races(candidate: Candidate) -> Problem:
    """No two programs of a launch store to one address without an atomic, in any plain case."""
    _interpreted(candidate)
    for case in candidate.plain():
        if case.dtype is not candidate.dtypes[0]:
            continue
        stores = Stores()
        with watched(stores.watch):
            candidate.shielded().results(candidate.inputs(case))
        stores.close()
        for kernel, seen in stores.races.items():
            if kernel not in candidate.provider.races:
                return case, f"{kernel}: two programs of a launch store to {seen}"
    return None


def program_order(candidate: Candidate) -> Problem:
    """Results are right in whatever order programs run, in any plain case; and they have equal
    bits where that is declared for GPUs, which is advice."""
    _interpreted(candidate)
    launched: set[str] = set()
    for case in candidate.plain():
        if case.dtype is not candidate.dtypes[0]:
            continue
        inputs = candidate.inputs(case)
        usual: dict[str, torch.Tensor] | None = None
        for name in NAMES:
            order = Order(name, seed=candidate.seed)
            with ordered(order) as kernels:
                results = candidate.results(inputs)
            launched |= set(kernels)
            if wrong := candidate.wrong(case, results, inputs):
                kernel = _culprit(candidate, case, order, kernels)
                return case, f"{kernel}, programs {name}: {wrong[0]}"
            usual = usual or candidate.results(inputs)
            others = [one for one, value in results.items() if not same_bits(value, usual[one])]
            if others and "cuda" in candidate.provider.deterministic:
                kernel = _culprit(candidate, case, order, kernels, usual)
                text = f"{kernel}, programs {name}: other bits of {', '.join(others)}"
                return case, f"{text}; declare deterministic={{'cpu'}}", Rank.ADVICE
    if not launched:
        raise Unsupported("it launches no kernel")
    return None


def _culprit(
    candidate: Candidate,
    case: OpCase,
    order: Order,
    kernels: Iterable[str],
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
            return kernel
    return " or ".join(kernels)


def large_offsets(candidate: Candidate) -> Problem:
    """Results are right for inputs and upstream gradients whose rows lie 2^30 elements apart."""
    _interpreted(candidate)
    if BF16 not in candidate.dtypes:
        raise Unsupported("it takes no bfloat16, of which 2^31 elements have addresses here")
    case = _with_entries(candidate, APART, BF16)
    op, inputs = candidate.op, candidate.inputs(case)
    axis = _first_axis(candidate)

    def is_placed(value: Any, declared: Tensor) -> bool:
        has_rows = isinstance(value, torch.Tensor) and declared.axes[:1] == (axis,)
        return has_rows and value.dtype is BF16

    def apart(values: Mapping[str, Any], declared: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: far(value) if is_placed(value, declared[name]) else value
            for name, value in values.items()
        }

    if not any(is_placed(value, op.inputs[name]) for name, value in inputs.args.items()):
        raise Unsupported(f"no input that it takes in bfloat16 has the first axis {axis}")
    try:
        far = Far()
    except NoAddressesError as error:
        raise Unsupported(f"2^31 elements cannot have addresses here: {error}") from error
    placed = replace(
        inputs,
        args=apart(inputs.args, op.inputs),
        upstream=apart(inputs.upstream, op.outputs),
    )
    graph = Graph(candidate, placed, prepare=lambda value: value.detach())
    results = {name: value.detach() for name, value in graph.outputs.items()}
    if op.differentiable:
        gradients = graph.gradients(lambda gradient: gradient)
        results |= {f"grad {name}": value for name, value in gradients.items()}
    wrong = candidate.wrong(case, results, inputs)
    return (case, str(wrong[0])) if wrong else None


def _interpreted(candidate: Candidate) -> None:
    if not candidate.interpreted:
        raise Unsupported("it is seen where kernels of Triton's are interpreted: use --device cpu")


def _first_axis(candidate: Candidate) -> str:
    return next(iter(candidate.op.inputs.values())).axes[0]


def _with_entries(candidate: Candidate, entries: int, dtype: torch.dtype) -> OpCase:
    """The smallest case of rows that are not trivial, with so many entries along the first axis.

    Raises Unsupported where the provider covers none.
    """
    axis = _first_axis(candidate)
    for case in candidate.plain():
        size = case.case.dims[axis]
        if candidate.op.mutated or not isinstance(size, int) or case.dtype is not dtype:
            continue
        resized = replace(case, case=case.case.resized(**{axis: entries}))
        if elements(candidate.op, case.case) >= 16 * size and resized.unsupported() is None:
            return resized
    raise Unsupported(f"no case that it covers can have {entries} entries along {axis}")
