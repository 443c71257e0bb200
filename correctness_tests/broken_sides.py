"""A side in a process of its own that breaks where a benchmark's name says so."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tinyllama.harness.op_contender import WrongResultError


class Broken:
    """In the place of `Side`. "turn dies" is a benchmark that breaks there, and how."""

    def __init__(self, **_: Any) -> None:
        pass

    def identity(self) -> str:
        return str(Path.cwd())

    def settle(self, processor: int) -> None:
        os.sched_setaffinity(0, {processor})

    def processors(self) -> list[set[int]]:
        """Of this thread, and of one that is begun now."""
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(os.sched_getaffinity, 0).result()
        return [os.sched_getaffinity(0), later]

    def begin(self, name: str) -> float:
        return _break("begin", name) or 1.0

    def expect(self, name: str, proofs: Any, warm_up: float) -> None:
        _break("expect", name)

    def turn(self, name: str) -> dict[str, float]:
        _break("turn", name)
        return {"device_seconds": 1.0 if Path.cwd().name == "base" else 1.1}

    def end(self, name: str) -> None:
        _break("end", name)


def _break(now: str, name: str) -> None:
    when, _, how = name.partition(" ")
    if now != when:
        return
    if how == "dies":
        print("a last word", flush=True)
        os._exit(9)
    if how == "hangs":
        time.sleep(600)
    raise WrongResultError("y: error 1 > 0.1")
