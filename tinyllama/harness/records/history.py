"""Change points in the stored records: where a figure moved, and between which commits.

This looks back over weeks and decides nothing: no exit status follows from it, and changes that are
smaller than the spread between runs are not found. The gate judges merges.

A series is one metric of one entry, over the complete records of unchanged trees of one device and
one set of versions, by date. The places of its changes are ruptures' optimal segmentation of the
logarithms (least squares). Whether there is a change at all is an F test of that segmentation; its
level is divided among all possible segmentations, which is valid whatever their dependence. The
parts between two changes are searched again. The test assumes that runs scatter alike and
independently: with outliers, as on a machine that others use, it shows more changes.
"""

import importlib.util
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from tinyllama.harness.machine.distribution import install, recording
from tinyllama.harness.records.entries import Ratio, Timed, is_number
from tinyllama.harness.records.numbers import significant
from tinyllama.harness.records.report import escaped
from tinyllama.harness.records.results import Record

METRICS = ("seconds", "over_baseline", "floor_share")
LEAST_RECORDS = 6
LEAST_APART = 3  # records of one level: a single outlier is not a level
LEVEL = 1e-3  # at most: the probability that a series without a change shows one
LEAST_SPREAD = 1e-3  # of the logarithms: a figure that seems exact may scatter so much
MACHINE = ("processor", "cores", "system", "driver", "power_limit_watts")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """The value of a series in one record."""

    record: Record
    value: float


@dataclass(frozen=True)
class Series:
    """One metric of one entry, oldest first."""

    entry: str
    metric: str
    readings: tuple[Reading, ...]

    @property
    def newest(self) -> Record:
        return self.readings[-1].record

    def shown(self, value: float) -> str:
        """A value of this metric, with its unit."""
        return f"{significant(value * 1e3)} ms" if self.metric == "seconds" else significant(value)


@dataclass(frozen=True)
class Change:
    """A series has another level from the reading at ``index`` on. before and after: the medians up
    to the neighbouring changes."""

    series: Series
    index: int
    before: float
    after: float

    @property
    def percent(self) -> float:
        return (self.after / self.before - 1) * 100

    @property
    def records(self) -> tuple[Record, Record]:
        """The last record before and the first one after."""
        before, after = self.series.readings[self.index - 1 : self.index + 1]
        return before.record, after.record

    @property
    def where(self) -> str:
        date = self.records[1].date[:10]
        return f"record {self.index + 1} of {len(self.series.readings)}, {date}"

    @property
    def levels(self) -> str:
        shown = self.series.shown
        return f"{shown(self.before)} → {shown(self.after)} ({self.percent:+.1f}%)"

    @property
    def commits(self) -> str:
        """The range of commits in which it lies, as git log takes it."""
        before, after = (record.commit[:10] for record in self.records)
        if "unknown" in (before, after):
            return "commits unknown"
        return f"{before}..{after}" if before != after else f"{after} both: not the code"

    @property
    def machine(self) -> str:
        """What differs between the machines of the two records, in words."""
        before, after = (record.machine for record in self.records)
        return ", ".join(
            f"{name} {before.get(name, 'unknown')} → {after.get(name, 'unknown')}"
            for name in MACHINE
            if before.get(name) != after.get(name)
        )

    def __str__(self) -> str:
        what = f"{self.series.entry} {self.series.metric}: {self.levels} from {self.where} on"
        return "; ".join(filter(None, (what, self.commits, self.machine)))


def every_series(records: Iterable[Record]) -> list[Series]:
    """The series of all metrics, however short: settings and entries in the order they appear."""
    found: dict[tuple[Any, ...], list[Reading]] = {}
    for record in sorted(records, key=lambda record: record.date):
        if not record.complete or record.dirty:
            continue
        setting = (record.device, *sorted(record.versions.items()))
        for entry in record.of(Timed):
            for metric, value in _values(entry):
                key = (setting, entry.name, metric)
                found.setdefault(key, []).append(Reading(record, value))
    return [Series(name, metric, tuple(r)) for (_, name, metric), r in found.items()]


def _values(entry: Timed) -> Iterator[tuple[str, float]]:
    """Each metric by its name in a file, with its value; of a ratio the median. The ratio of a
    contender over itself is skipped."""
    for metric in METRICS if entry.ran else ():
        found: Any = getattr(entry, metric, None)
        if isinstance(found, Ratio) and any(part != found.median for part in found):
            found = found.median
        if is_number(found) and found > 0:
            name = f"over_{entry.baseline}" if metric == "over_baseline" else metric
            yield name, float(found)


def watched(records: Iterable[Record]) -> list[Series]:
    """The series that are long enough to be searched."""
    return [s for s in every_series(records) if len(s.readings) >= LEAST_RECORDS]


def unsearched(records: Sequence[Record]) -> str:
    """Why no series is searched; empty where some are."""
    if not watched(records):
        return _too_few(records)
    if importlib.util.find_spec("ruptures") is None:
        return f"Change points need ruptures: {install('report')}, on Python up to 3.13."
    return ""


def _too_few(records: Sequence[Record]) -> str:
    text = (
        f"Change points need {LEAST_RECORDS} complete records of a group, with one device and one "
        f"set of versions; {recording()} adds one. "
    )
    most = max(every_series(records), key=lambda s: len(s.readings), default=None)
    if most is None:
        return f"{text}There are none."
    newest = most.newest
    return f"{text}The most there are: {len(most.readings)}, of {newest.group} on {newest.device}."


def changes(series: Series) -> list[Change]:
    """The changes of a series, oldest first. Raises ModuleNotFoundError without ruptures."""
    values = [reading.value for reading in series.readings]
    places = _places(np.log(values))
    edges = [0, *places, len(values)]
    levels = [median(values[start:end]) for start, end in itertools.pairwise(edges)]
    return [Change(series, i, *levels[n : n + 2]) for n, i in enumerate(places)]


def _places(logs: Floats) -> list[int]:
    """The indices at which a level begins. One change is tried first, then two: of a level that
    comes and goes, neither change may show alone."""
    for count in (1, 2):
        if len(logs) < (count + 1) * LEAST_APART:
            break
        places = _segmentation(logs, count)
        if _log_p(logs, places) < math.log(LEVEL / 2):
            edges = [0, *places, len(logs)]
            inside = [
                start + place
                for start, end in itertools.pairwise(edges)
                for place in _places(logs[start:end])
            ]
            return sorted([*places, *inside])
    return []


def _segmentation(logs: Floats, count: int) -> list[int]:
    import ruptures

    search = ruptures.KernelCPD(kernel="linear", min_size=LEAST_APART)
    return [int(place) for place in search.fit(logs[:, None]).predict(n_bkps=count)[:-1]]


def _log_p(logs: Floats, places: list[int]) -> float:
    """The logarithm of a bound on the probability that, in a series without changes, some
    segmentation with as many changes fits so much better than the mean."""
    size, count = len(logs), len(places)
    freedom = size - count - 1
    rest = _scatter(logs, places)
    gain = _scatter(logs, []) - rest
    ratio = (gain / count) / ((rest + size * LEAST_SPREAD**2) / freedom)
    segmentations = math.comb(size - (count + 1) * (LEAST_APART - 1) - 1, count)
    return float(scipy.stats.f.logsf(ratio, count, freedom)) + math.log(segmentations)


def _scatter(logs: Floats, places: list[int]) -> float:
    """The sum of the squared distances from the mean of each level."""
    return sum(float(np.sum((part - part.mean()) ** 2)) for part in np.split(logs, places))


def markdown(records: Sequence[Record]) -> str:
    """A section on the changes of all devices, under a heading."""
    text = escaped(unsearched(records))
    if not text:
        series = watched(records)
        found = [change for one in series for change in changes(one)]
        lines = [escaped(f"- {change.series.newest.device}: {change}") for change in found]
        text = "\n".join([told(len(series), len(found)), *([""] if lines else []), *lines])
    return f"### Change points\n\n{text}"


def told(series: int, found: int) -> str:
    """How much was searched and found, and how far to trust it."""
    number = "No change" if not found else f"{found} change{'s' if found > 1 else ''}"
    searched = f"{series} series" if series > 1 else "one series"
    return (
        f"{number} in {searched}, each of {LEAST_RECORDS} or more records; a series without a "
        f"change shows one in at most {LEVEL:.1%} of histories, if runs scatter alike. "
        "No exit status follows from it."
    )
