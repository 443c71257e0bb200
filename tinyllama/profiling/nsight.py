"""Counters that Nsight Compute wrote: a line for each metric of each launch, after its notices."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tinyllama.profiling.profiles import Counter, Profile, ProfileError, Total, summed
from tinyllama.profiling.readers import LONGEST, content, number, readable

HEADING = '"ID"'  # begins the heading, and == a notice
COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
DURATION = "gpu__time_duration.sum"
NANOSECONDS = {"nsecond": 1, "ns": 1, "usecond": 1000, "us": 1000, "msecond": 10**6, "ms": 10**6}
NANOSECONDS |= {"second": 10**9, "s": 10**9}


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
    start = next((i for i, line in enumerate(lines) if line.startswith(HEADING)), None)
    if start is None:
        notices = (line for line in lines if line.startswith(("==ERROR==", "==WARNING==")))
        reason = next(notices, "profile again")[:LONGEST]
        raise ProfileError(f"{name} has no counter of Nsight Compute: {reason}")
    table = csv.DictReader((line for line in lines[start:] if line[:1] == '"'), strict=True)
    with readable(Path(name), "counters of Nsight Compute"):
        for row in table:
            launch, kernel, metric, unit, value = (row[column] for column in COLUMNS)
            plain = (value or "").replace(",", "")  # of thousands
            exact = number(plain, f"{name}: {metric} of {kernel[:LONGEST]!r}")
            yield Reading(launch, kernel, metric, unit or "", float(exact))


def read(path: Path) -> Profile:
    """The time of each kernel, and its counters: of shares the mean over the launches, of others
    the sum. Raises ProfileError."""
    with readable(path, "counters of Nsight Compute"):
        text = content(path).decode("utf-8-sig", "replace")
    totals: list[Total] = []
    values: dict[tuple[str, str, str], list[float]] = {}
    for _, kernel, metric, unit, value in readings(str(path), text):
        if metric != DURATION:
            values.setdefault((kernel, metric, unit), []).append(value)
        elif unit in NANOSECONDS:
            totals.append(Total(kernel, 1, round(value * NANOSECONDS[unit])))
        else:
            raise ProfileError(f"{path}: {metric} is in {unit!r:.40}: use {', '.join(NANOSECONDS)}")
    counters = tuple(
        Counter(kernel, metric, sum(series) / (len(series) if unit == "%" else 1), unit)
        for (kernel, metric, unit), series in values.items()
    )
    return Profile(summed(totals), counters=counters)
