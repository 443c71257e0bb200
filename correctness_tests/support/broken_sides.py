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
        from tinyllama.harness.gate.side import Side

        Side.pin(self, processor)  # type: ignore[arg-type]

    def seen(self) -> dict[str, list[set[int]]]:
        """The processors of each thing that was asked: of its thread, and of an older one."""
        return self.processors_of

    def _see(self, what: str, name: str) -> None:
        older = self.pool.submit(os.sched_getaffinity, 0).result()
        self.processors_of[what] = [os.sched_getaffinity(0), older]
        _break(what, name)

    def begin(self, name: str) -> float:
        self._see("begin", name)
        return 1.0

    def expect(self, name: str, proofs: Any, warm_up: float) -> None:
        self._see("expect", name)

    def turn(self, name: str, seed: int) -> dict[str, float]:
        self._see("turn", name)
        return {"device_seconds": 1.0 if Path.cwd().name == "base" else 1.1}

    def notes(self, name: str, seeds: list[int]) -> list[list[int]]:
        return [[] for _ in seeds]

    def hold(self, name: str, *call: Any) -> None:
        self._see("hold", name)

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
    from tinyllama.harness.measure.op_contender import WrongResultError

    raise WrongResultError("y: error 1 > 0.1")
