"""A side in a process of its own that breaks where a benchmark's name says so.

It imports torch only where it must: that takes a second.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class Broken:
    """In the place of `Side`. "turn dies" is a benchmark that breaks there, and how."""

    def __init__(self, **_: Any) -> None:
        self.processors = os.sched_getaffinity(0)
        self.processors_of: dict[str, list[set[int]]] = {}
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(os.getpid).result()

    def identity(self) -> str:
        return str(Path.cwd())

    def started(self) -> tuple[int, str]:
        """What differs from process to process, if nobody sees to it."""
        return hash("a text"), os.environ["OMP_NUM_THREADS"]

    def pin(self, processor: int | None) -> None:
        from tinyllama.harness.gate.worker import Side

        Side.pin(self, processor)  # type: ignore[arg-type]

    def seen(self) -> dict[str, list[set[int]]]:
        """The processors of each thing that was asked: of its thread, and of an older one."""
        return self.processors_of

    def _see(self, what: str, name: str) -> None:
        older = self.pool.submit(os.sched_getaffinity, 0).result()
        self.processors_of[what] = [os.sched_getaffinity(0), older]
        _break(what, name)

    def begin(self, name: str, metrics: list[str]) -> float:
        self._see("begin", name)
        return 1.0

    def make_ready(self, name: str, proofs: Any, warm_up: float) -> None:
        self._see("make_ready", name)

    def turn(self, name: str, seed: int, kept: int | None) -> dict[str, float]:
        self._see("turn", name)
        took = 1.0 if Path.cwd().name == "base" else 1.1
        return {"device_seconds": took, "all work of device_seconds": took}

    def proofs(self, name: str) -> dict[str, Any]:
        self._see("proofs", name)
        return {}

    def end(self, name: str) -> None:
        self._see("end", name)


def _break(now: str, name: str) -> None:
    when, _, how = name.partition(" ")
    if now != when:
        return
    if how == "dies":
        print("a last word", flush=True)
        os._exit(9)
    if how == "hangs":
        time.sleep(600)
    from tinyllama.harness.measure.right_results import WrongResultError

    raise WrongResultError("y: error 1 > 0.1")
