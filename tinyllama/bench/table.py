"""Readings that were taken alternately, entered into pytest-benchmark's table and JSON.

The contenders of a group must be measured alternately, and pytest-benchmark measures one test
after the other. So its timer here is a clock that moves by one reading in each round and not
otherwise: its statistics are those of the readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


class ReadingsClock:
    """A timer for pytest-benchmark, in seconds; `advance` moves it by the next reading."""

    def __init__(self, readings: Sequence[float]) -> None:
        self._readings = iter(readings)
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self) -> None:
        self.seconds += next(self._readings)


def show(
    request: pytest.FixtureRequest, readings: Sequence[float], group: str, **extra: Any
) -> None:
    """Enter readings (seconds) of the test that asks into the table, in a group of their own."""
    clock = ReadingsClock(readings)
    request.node.add_marker(pytest.mark.benchmark(timer=clock, group=group))
    benchmark = request.getfixturevalue("benchmark")
    benchmark.extra_info.update(extra)
    benchmark.pedantic(clock.advance, rounds=len(readings), iterations=1)
