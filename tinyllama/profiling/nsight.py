"""Counters that Nsight Compute wrote: a line for each metric of each launch, after its notices."""

import csv
from pathlib import Path

from tinyllama.profiling.profiles import Counter, Profile, ProfileError, Total, summed
from tinyllama.profiling.readers import LONGEST, content, number, readable

HEADING = '"ID"'  # begins the heading, and == a notice
COLUMNS = ("Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
DURATION = "gpu__time_duration.sum"
NANOSECONDS = {"nsecond": 1, "ns": 1, "usecond": 1000, "us": 1000, "msecond": 10**6, "ms": 10**6}
NANOSECONDS |= {"second": 10**9, "s": 10**9}


def read(path: Path) -> Profile:
    """The time of each kernel, and its counters: of shares the mean over the launches, of others
    the sum. Raises ProfileError."""
    totals: list[Total] = []
    values: dict[tuple[str, str, str], list[float]] = {}
    with readable(path, "counters of Nsight Compute"):
        lines = content(path).decode("utf-8-sig", "replace").splitlines()
        start = next((n for n, line in enumerate(lines) if line.startswith(HEADING)), None)
        if start is None:
            notices = (line for line in lines if line.startswith(("==ERROR==", "==WARNING==")))
            reason = next(notices, "profile again")[:LONGEST]
            raise ProfileError(f"{path} has no counter of Nsight Compute: {reason}")
        rows = (line for line in lines[start:] if line.startswith('"'))
        for row in csv.DictReader(rows, strict=True):
            kernel, metric, unit, text = (row[column] for column in COLUMNS)
            plain = (text or "").replace(",", "")  # of thousands
            value = number(plain, f"{path}: {metric} of {kernel[:LONGEST]!r}")
            if metric != DURATION:
                values.setdefault((kernel, metric, unit), []).append(float(value))
            elif unit in NANOSECONDS:
                totals.append(Total(kernel, 1, round(value * NANOSECONDS[unit])))
            else:
                units = ", ".join(NANOSECONDS)
                raise ProfileError(f"{path}: {metric} is in {unit!r:.40}: use {units}")
    counters = tuple(
        Counter(kernel, metric, sum(series) / (len(series) if unit == "%" else 1), unit)
        for (kernel, metric, unit), series in values.items()
    )
    return Profile(summed(totals), counters=counters)
