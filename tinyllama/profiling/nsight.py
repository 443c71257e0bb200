"""Counters that Nsight Compute wrote: a line for each metric of each launch, after its notices."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tinyllama.profiling.kernels import Counter, Profile, ProfileError, Total, summed

FIRST = '"ID"'  # of the heading
COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
DURATION = "gpu__time_duration.sum"
SECONDS = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3}
SECONDS |= {"second": 1.0, "s": 1.0}


def is_one(path: Path) -> bool:
    """Whether a CSV file is of Nsight Compute: a notice, or its heading, is its first line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(("==", FIRST))


class Reading(NamedTuple):
    """One counter of one launch."""

    launch: str
    kernel: str
    metric: str
    unit: str
    value: float


def readings(name: str, text: str) -> Iterator[Reading]:
    """What Nsight Compute counted, from its output; name: what that is called in an error. Raises
    ProfileError."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(FIRST)), None)
    if start is None:
        said = next((line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))), "")
        raise ProfileError(f"{name} has no counter of Nsight Compute: {said or 'profile again'}")
    of_table = [line for line in lines[start:] if line.startswith('"')]
    if not of_table[-1].endswith('"'):
        raise ProfileError(f"{name} is truncated: profile again")
    table = csv.DictReader(of_table)
    lacking = [column for column in COLUMNS if column not in (table.fieldnames or ())]
    if lacking:
        raise ProfileError(f"{name} has no column {lacking[0]!r}: profile again")
    for row in table:
        launch, kernel, metric, unit, value = (row[column] for column in COLUMNS)
        yield Reading(launch, kernel, metric, unit or "", _number(name, value, metric, kernel))


def read(path: Path) -> Profile:
    """The time of each kernel, and its counters: of shares the mean over the launches, of others
    the sum. Raises ProfileError."""
    totals: list[Total] = []
    values: dict[tuple[str, str, str], list[float]] = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for _, kernel, metric, unit, value in readings(str(path), text):
        if metric == DURATION:
            if unit not in SECONDS:
                raise ProfileError(f"{path}: {metric} is in {unit!r}: use {', '.join(SECONDS)}")
            totals.append(Total(kernel, 1, value * SECONDS[unit]))
        else:
            values.setdefault((kernel, metric, unit), []).append(value)
    found = tuple(
        Counter(kernel, metric, sum(each) / (len(each) if unit == "%" else 1), unit)
        for (kernel, metric, unit), each in values.items()
    )
    return Profile(summed(totals), counters=found, sources=(str(path),))


def _number(name: str, text: str | None, metric: str, kernel: str) -> float:
    """A value; thousands have commas."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ProfileError(f"{name}: {metric} of {kernel} is {text!r}, no number: profile again")
    return value
