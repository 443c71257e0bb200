"""Counters that Nsight Compute wrote: a line for each metric of each launch, after its notices."""

from __future__ import annotations

import csv
import math
from pathlib import Path

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


def read(path: Path) -> Profile:
    """The time of each kernel, and its counters: of shares the mean over the launches, of others
    the sum. Raises ProfileError."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(FIRST)), None)
    if start is None:
        said = next((line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))), "")
        raise ProfileError(f"{path} has no counter of Nsight Compute: {said or 'profile again'}")
    of_table = [line for line in lines[start:] if line.startswith('"')]
    if not of_table[-1].endswith('"'):
        raise ProfileError(f"{path} is truncated: profile again")
    table = csv.DictReader(of_table)
    lacking = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if lacking:
        raise ProfileError(f"{path} has no column {lacking[0]!r}: profile again")
    totals: list[Total] = []
    values: dict[tuple[str, str, str], list[float]] = {}
    for row in table:
        kernel, metric, unit = row["Kernel Name"], row["Metric Name"], row["Metric Unit"] or ""
        value = _number(path, row["Metric Value"], metric, kernel)
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


def _number(path: Path, text: str | None, metric: str, kernel: str) -> float:
    """A value; thousands have commas."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ProfileError(f"{path}: {metric} of {kernel} is {text!r}, no number: profile again")
    return value
