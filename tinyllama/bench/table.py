"""Readings that were taken alternately, entered into pytest-benchmark's table and JSON.

The contenders of a group must be measured alternately, and pytest-benchmark measures one test
after the other. So its timer here is a clock that advances by one reading in each round, and its
statistics are those of the readings.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

# A test whose contender could not be timed has nothing to enter.
may_stay_empty = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used at all")


class ReadingsClock:
    """A timer for pytest-benchmark, in seconds; `advance` moves it by the next reading."""

    def __init__(self) -> None:
        self.readings: Iterator[float] = iter(())
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self) -> None:
        self.seconds += next(self.readings)


class Table:
    """The table of pytest-benchmark, for the one test that asks for it."""

    def __init__(self, fixture: Any, clock: ReadingsClock) -> None:
        self.fixture, self.clock = fixture, clock

    def enter(self, readings: Sequence[float], group: str, **extra: Any) -> None:
        """Enter readings (seconds), in a group of their own."""
        self.clock.readings = iter(readings)
        self.fixture.group = group
        self.fixture.extra_info.update(extra)
        self.fixture.pedantic(self.clock.advance, rounds=len(readings), iterations=1)


@pytest.fixture
def readings_clock(request: pytest.FixtureRequest) -> ReadingsClock:
    """The timer of this test, named in its marker before pytest-benchmark's fixture reads it."""
    clock = ReadingsClock()
    request.node.add_marker(pytest.mark.benchmark(timer=clock))
    return clock


@pytest.fixture
def table(readings_clock: ReadingsClock, benchmark: Any) -> Table:
    """pytest-benchmark's table. ``benchmark`` is an argument, as ``--benchmark-only`` asks."""
    return Table(benchmark, readings_clock)
