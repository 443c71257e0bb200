"""Slowdowns that a committed file accepts, until a release:

    [[accepted]]
    benchmark = "rms_norm/triton/..."   # its exact name
    metric = "device_seconds"           # where none is named
    amount = 0.03                       # up to 3% slower than the last release
    reason = "the sum is compensated now"
    release = "0.3.0"                   # from this version on the entry is an error

    [[accepted]]
    benchmark = "rope/triton/..."
    new = true                          # the base does not have it: nothing to compare
    reason = "the first benchmark of its kind"
    release = "0.3.0"

What the base's own file accepts is in the base's figures already: it is not accepted again, or
every later merge could be slower by as much once more.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "accepted_slowdowns.toml"
METRICS = (
    "device_seconds",
    "host_seconds",
    "peak_bytes",
    "kernels",
    "copies",
    "host_syncs",
    "compile_seconds",
)
_KEYS = ("benchmark", "metric", "amount", "new", "reason", "release")
_RELEASE = re.compile(r"\d+(\.\d+)*")
_BEFORE_RELEASE = re.compile(r"[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)\d*\b")


@dataclass(frozen=True)
class Entry:
    """What is accepted of one benchmark: an amount of a metric, or that it is new."""

    benchmark: str
    reason: str
    release: str
    metric: str = METRICS[0]
    amount: float = 0.0
    new: bool = False


@dataclass(frozen=True)
class Accepted:
    """The entries of a file, and those that the base's file has."""

    path: Path
    entries: tuple[Entry, ...] = ()
    of_base: tuple[Entry, ...] = ()

    def amount(self, benchmark: str, metric: str) -> float:
        """How much slower than the base it may be: 0.03 is 3%."""
        now, before = (
            1 + sum(e.amount for e in entries if (e.benchmark, e.metric) == (benchmark, metric))
            for entries in (self.entries, self.of_base)
        )
        return max(0.0, now / before - 1)

    def is_new(self, benchmark: str) -> bool:
        """Whether the base need not have it."""
        now, before = (
            any(e.new and e.benchmark == benchmark for e in entries)
            for entries in (self.entries, self.of_base)
        )
        return now and not before

    def check(self, known: Collection[str]) -> None:
        """Raise ValueError for an entry of a benchmark that is not among the known names."""
        for number, entry in enumerate(self.entries, 1):
            if entry.benchmark not in known:
                where = _where(self.path, number, entry.benchmark)
                raise ValueError(f"{where}: there is no such benchmark: rename or delete the entry")


def load(path: Path, version: str, base: Path | None = None) -> Accepted:
    """What a file accepts in a version of the project; nothing where there is no file.

    base: the file of the base. Raises ValueError that names the file, the entry and the fix.
    """
    entries = _read(path)
    for number, entry in enumerate(entries, 1):
        if not _is_before(version, entry.release):
            raise ValueError(
                f"{_where(path, number, entry.benchmark)}: it was accepted until {entry.release}, "
                f"and this is {version}: delete the entry, or accept it anew with a reason"
            )
    return Accepted(path, entries, () if base is None else _read(base))


def _read(path: Path) -> tuple[Entry, ...]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from error
    tables = content.pop("accepted", [])
    if content or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ValueError(f"{path}: use [[accepted]] tables and nothing else")
    found: list[Entry] = []
    for number, table in enumerate(tables, 1):
        where = _where(path, number, table.get("benchmark"))
        entry = _entry(where, table)
        for earlier in found:
            same = earlier.metric == entry.metric or earlier.new or entry.new
            if earlier.benchmark == entry.benchmark and same:
                raise ValueError(f"{where}: it is there twice: delete one of the entries")
        found.append(entry)
    return tuple(found)


def _where(path: Path, number: int, benchmark: object) -> str:
    return f"{path}, accepted {number} ({benchmark!r})"


def _entry(where: str, table: Mapping[str, Any]) -> Entry:
    for name in table:
        if name not in _KEYS:
            raise ValueError(f"{where}: unknown key {name!r}: use {', '.join(_KEYS)}")
    for name in ("benchmark", "reason", "release"):
        if name not in table:
            raise ValueError(f"{where}: it lacks {name!r}: add it")
        if not isinstance(table[name], str) or not table[name].strip():
            raise ValueError(f"{where}: {name} is {table[name]!r}: use a text")
    if not _RELEASE.fullmatch(table["release"]):
        raise ValueError(f"{where}: release is {table['release']!r}: use numbers, as in '0.3.0'")
    if ("amount" in table) == ("new" in table):
        raise ValueError(f"{where}: give amount or new, and not both")
    if "new" in table:
        if table["new"] is not True:
            raise ValueError(f"{where}: new is {table['new']!r}: use true, or an amount")
        if "metric" in table:
            raise ValueError(f"{where}: what is new is so in every metric: take metric out")
    if table.get("metric", METRICS[0]) not in METRICS:
        raise ValueError(f"{where}: unknown metric {table['metric']!r}: use {', '.join(METRICS)}")
    amount = table.get("amount", 1)
    number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if not number or not math.isfinite(amount) or not 0 < amount <= 1:
        raise ValueError(f"{where}: amount is {amount!r}: use a share, as 0.03 for 3%, at most 1")
    return Entry(**table)


def _is_before(version: str, release: str) -> bool:
    """Whether a version comes before a release: a development version of it does."""
    numbers = _RELEASE.match(version)
    if numbers is None:
        raise ValueError(f"the version is {version!r}: use one that begins as '0.3.0' does")
    if _BEFORE_RELEASE.match(version, numbers.end()):
        return _numbers(numbers[0]) <= _numbers(release)
    return _numbers(numbers[0]) < _numbers(release)


def _numbers(version: str) -> list[int]:
    """Without the zeros at the end: 1.0 is 1."""
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return parts
