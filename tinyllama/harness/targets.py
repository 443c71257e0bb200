"""Targets as data: claims of documents and bars of a project, held to a record's entries."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SPEED = "speed"
FASTEST_PEER = "fastest peer"
METRICS = (
    SPEED,
    "samples_per_second",
    "live_bytes",
    "peak_bytes",
    "kernels",
    "joules_per_sample",
    "mfu",
)
NEVER_RUN = "never run on AMD hardware"


INTERVAL, MEDIAN = "interval", "median"


class TargetError(ValueError):
    """A target that cannot be used; the message names file, target and fix."""


@dataclass(frozen=True)
class Target:
    """A bound on a metric of one tier; the fields are explained in targets.toml.

    workload, precision: those it is for; empty for all.
    """

    tier: str
    workload: tuple[str, ...]
    precision: tuple[str, ...]
    metric: str
    device: str
    source: str
    at_least: float | None = None
    at_most: float | None = None
    over: str | None = None
    documented: bool = False
    asserted: bool = True
    judged_by: str = INTERVAL
    caveat: str = ""

    @property
    def bound(self) -> float:
        bound = self.at_least if self.at_least is not None else self.at_most
        assert bound is not None
        return bound

    @property
    def direction(self) -> str:
        return ">=" if self.at_least is not None else "<="

    def __str__(self) -> str:
        over = f" over {self.over}" if self.over else ""
        return f"{self.tier} {self.metric}{over} {self.direction} {self.bound:g}"

    def covers(self, workload: str, precision: str) -> bool:
        """Whether it is about this workload and precision, on whatever device."""
        return (not self.workload or workload in self.workload) and (
            not self.precision or precision in self.precision
        )

    def holds_on(self, device: str) -> bool:
        """Whether it is asserted on a device of that name."""
        return self.asserted and (self.device == "any" or self.device.lower() in device.lower())

    def measured(self, entries: Mapping[str, Mapping[str, Any]]) -> list[float] | None:
        """What entries, by contender, give for it: [value, low, high]; None where they lack it.

        A ratio of times is measured round by round and has an interval; where entries hold
        only medians, and for counts, the three are equal.
        """
        own = entries.get(self.tier, {})
        other = self._other(entries)
        if self.over is None:
            return _thrice(_value(own, self.metric))
        if other is None:
            return None
        if self.metric == SPEED:
            kept = own.get("over", {}).get(other)
            if kept is not None:
                return list(kept)
        mine, theirs = _value(own, self.metric), _value(entries.get(other, {}), self.metric)
        return _thrice(mine / theirs) if mine and theirs else None

    def _other(self, entries: Mapping[str, Mapping[str, Any]]) -> str | None:
        if self.over != FASTEST_PEER:
            return self.over
        peers = {n: e for n, e in entries.items() if e.get("role") == "peer" and "seconds" in e}
        return min(peers, key=lambda name: peers[name]["seconds"], default=None)

    def met(self, found: list[float]) -> bool:
        """Whether a measurement holds the bound: at the worse end of its interval, or where
        the target says so by its median."""
        median, low, high = found
        if self.judged_by == MEDIAN:
            low = high = median
        if self.at_least is not None:
            return low >= self.at_least
        return high <= self.bound


def _value(entry: Mapping[str, Any], metric: str) -> float | None:
    if metric == SPEED:
        return 1 / entry["seconds"] if "seconds" in entry else None
    return entry.get(metric)


def _thrice(value: float | None) -> list[float] | None:
    return None if value is None else [value] * 3


def load(path: Path) -> list[Target]:
    """The targets of a file. Raises TargetError for one that cannot be used."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TargetError(f"{path}: {error}") from error
    tables = data.get("target")
    several = isinstance(tables, list) and tables and all(isinstance(t, dict) for t in tables)
    if set(data) != {"target"} or not several:
        raise TargetError(f"{path}: use [[target]] tables and nothing else")
    found = [_target(f"{path}, target {i}", t) for i, t in enumerate(data["target"], 1)]
    for index, target in enumerate(found):
        if target in found[:index]:
            raise TargetError(f"{path}, target {index + 1}: {target} is there twice: remove one")
    return found


def _target(where: str, table: Mapping[str, Any]) -> Target:
    known = {field.name for field in fields(Target)}
    for name in sorted(set(table) - known):
        raise TargetError(f"{where}: unknown key {name!r}: use {', '.join(sorted(known))}")
    for name in ("tier", "workload", "precision", "metric", "device", "source"):
        if name not in table:
            raise TargetError(f"{where}: it lacks {name!r}: add it")
    for name, value in table.items():
        if wrong := _mistyped(name, value):
            raise TargetError(f"{where}: {name} is {value!r}: use {wrong}")
    if ("at_least" in table) == ("at_most" in table):
        raise TargetError(f"{where}: give at_least or at_most, and not both")
    bound = table.get("at_least", table.get("at_most"))
    number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
    if not number or not math.isfinite(bound) or bound <= 0:
        raise TargetError(f"{where}: its bound is {bound!r}: use a number above 0")
    if table["metric"] not in METRICS:
        raise TargetError(f"{where}: unknown metric {table['metric']!r}: use {', '.join(METRICS)}")
    if table["metric"] == SPEED and "over" not in table:
        raise TargetError(f"{where}: a speed is a ratio: say over what")
    if table.get("judged_by", INTERVAL) not in (INTERVAL, MEDIAN):
        raise TargetError(
            f"{where}: judged_by is {table['judged_by']!r}: use {INTERVAL} or {MEDIAN}"
        )
    lists = {name: _listed(table[name]) for name in ("workload", "precision")}
    # A documented claim is shown; it is asserted only where that is said.
    asserted = {"asserted": table.get("asserted", not table.get("documented", False))}
    return Target(**{**table, **lists, **asserted})


def _mistyped(name: str, value: Any) -> str | None:
    """What a key takes, where this value is not of that kind; bounds are looked at apart."""
    if name in ("at_least", "at_most"):
        return None
    if name in ("documented", "asserted"):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, str) and (value or name == "caveat"):
        return None
    if name not in ("workload", "precision"):
        return "a text"
    several = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    return None if several and "any" not in value else 'a name, a list of names, or "any"'


def _listed(value: str | list[str]) -> tuple[str, ...]:
    if value == "any":
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def of_group(targets: list[Target], workload: str, precision: str) -> Iterator[Target]:
    """The targets about a workload and precision, those of other devices too."""
    return (target for target in targets if target.covers(workload, precision))
