"""Checks in a process of their own: what ends that process is a finding, and the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, accuracy, run
from tinyllama.harness.declare.registry import discover, load_file
from tinyllama.harness.machine.worker import Worker, WorkerError


class Checks:
    """In the worker: the providers that a file declares, and the checks on them."""

    def __init__(self, package: str, file: str, device: str, seed: int) -> None:
        ops = discover(package)
        before = {str(provider) for op in ops.values() for provider in op.providers.values()}
        load_file(file, ops)
        self.candidates = {
            str(provider): Candidate(op, provider, torch.device(device), seed)
            for op in ops.values()
            for provider in op.providers.values()
            if str(provider) not in before
        }

    def providers(self) -> list[str]:
        return list(self.candidates)

    def findings(self, provider: str, only: list[str], right: bool) -> list[Finding]:
        return list(run(self.candidates[provider], only, right=right))


def check_file(
    package: str, file: str, device: str, seed: int, only: Sequence[str]
) -> Iterator[tuple[str, list[Finding]]]:
    """Each provider that a file declares, and the findings of these checks on it.

    package: has the ops on which the file may register providers.
    Raises WorkerError when the file cannot be loaded.
    """
    together = [name for name in only if name in accuracy.NAMES]
    groups = [*([together] if together else []), *([n] for n in only if n not in together)]
    worker: Worker | None = None
    try:
        worker = _started(package, file, device, seed)
        for provider in worker.call("checks", "providers"):
            found: list[Finding] = []
            for names in groups:
                right = all(one.outcome.good for one in found if one.check in accuracy.PLAIN)
                try:
                    found += worker.call("checks", "findings", provider, names, right)
                except WorkerError as error:  # the process ended: the next check gets a new one
                    found += [Finding(name, Outcome.CRASHED, message=str(error)) for name in names]
                    worker.close()
                    worker = _started(package, file, device, seed)
            yield provider, found
    finally:
        if worker is not None:
            worker.close()


def _started(package: str, file: str, device: str, seed: int) -> Worker:
    worker = Worker("check", preload=[package])
    try:
        factory = f"{__name__}:Checks"
        worker.make("checks", factory, package=package, file=file, device=device, seed=seed)
    except WorkerError:
        worker.close()
        raise
    return worker
