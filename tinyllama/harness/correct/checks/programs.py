"""What only shows among several programs: races."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyllama.harness.correct.checks.finding import Candidate, Problem, Unsupported
from tinyllama.harness.correct.checks.graph import Graph
from tinyllama.harness.correct.checks.guards import watched
from tinyllama.harness.kernels.launch import identity


class Stores:
    """Notes the addresses that each program of a launch stores without an atomic.

    races: kernel -> what was seen, where two programs of a launch stored one address.
    """

    def __init__(self) -> None:
        self.races: dict[str, str] = {}
        self._launch: Any = None
        self._stored: dict[tuple[int, ...], list[Any]] = {}

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> None:
        from tinyllama.harness.kernels import interpreter

        if kind != "store":
            return
        launch, program = interpreter.running()
        if launch is not self._launch:
            self.close()
            self._launch = launch
        wanted = np.asarray(addresses)[np.broadcast_to(accessed, np.shape(addresses))]
        self._stored.setdefault(program, []).append(wanted.ravel())

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
    if not candidate.interpreted:
        raise Unsupported("it is seen where kernels of Triton's are interpreted: use --device cpu")
    for case in candidate.plain():
        if case.dtype is not candidate.dtypes[0]:
            continue
        stores = Stores()
        with watched(stores.watch):
            graph = Graph(candidate, candidate.inputs(case))
            if candidate.op.differentiable:
                graph.gradients()
        stores.close()
        for kernel, seen in stores.races.items():
            if kernel not in candidate.provider.races:
                return case, f"{kernel}: two programs of a launch store to {seen}"
    return None
