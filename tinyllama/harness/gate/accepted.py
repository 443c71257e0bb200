"""Slowdowns that a committed file accepts, until a release:

    [[accepted]]
    benchmark = "rms_norm/triton/..."   # its exact name
    device = "gpu"                      # or "cpu"; by default both
    metric = "device_seconds"           # the default
    amount = 0.03                       # up to 3% slower than the last release
    reason = "the sum is compensated now"
    release = "0.3.0"                   # from this version on the entry is an error

    [[accepted]]
    benchmark = "rope/triton/..."
    metric = "copies"
    amount = 1                          # for counts and bytes: one more than the base
    reason = "x may be a view now"
    release = "0.3.0"

    [[accepted]]
    benchmark = "rope/naive/..."
    removed = true                      # the candidate no longer has it
    reason = "nobody uses it"
    release = "0.3.0"

    [[judge]]                           # what judges, and is the base's in the verdict
    changed = "pytest.ini"              # as the gate names it, or "rms_norm: reference"
    digest = "0123456789ab"             # of what it became, as the gate says
    reason = "warnings of torch 3 are known"

The base's figures include what its own file accepts. That is not accepted again: every later merge
could then be slower by the same amount.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinyllama.harness.gate.judged import Change
from tinyllama.harness.machine.files import read_regular
from tinyllama.harness.machine.parsed import toml_of

FILE = "accepted_slowdowns.toml"
COUNTED = ("peak_bytes", "kept_bytes", "kernels", "copies", "host_syncs")
METRICS = ("device_seconds", "host_seconds", "compile_seconds", "layouts", *COUNTED)
DEVICES = ("cpu", "gpu")
JUDGE_KEYS = ("changed", "digest", "reason")
_KEYS = ("benchmark", "device", "metric", "amount", "removed", "reason", "release")
_RELEASE = re.compile(r"\d{1,9}(\.\d{1,9})*")
_BEFORE_RELEASE = re.compile(r"[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)\d*\b")


@dataclass(frozen=True)
class Entry:
    """What is accepted of one benchmark: an amount of a metric, or that it is removed.

    amount: a share, or for a metric of `COUNTED` a whole number of how many more. device: one of
    `DEVICES`, or empty for both."""

    benchmark: str
    reason: str
    release: str
    metric: str = METRICS[0]
    amount: float = 0.0
    removed: bool = False
    device: str = ""
    number: int = field(default=0, compare=False)  # its place in the file

    @property
    def more(self) -> int:
        """How many more; 0 where the amount is a share."""
        counted = self.metric in COUNTED and isinstance(self.amount, int)
        return int(self.amount) if counted else 0

    @property
    def share(self) -> float:
        return 0.0 if self.more else self.amount


@dataclass(frozen=True)
class Accepted:
    """The entries of a file, and those that the base's file has. changes: of what judges."""

    path: Path
    entries: tuple[Entry, ...] = ()
    of_base: tuple[Entry, ...] = ()
    changes: frozenset[Change] = frozenset()

    def amount(self, benchmark: str, metric: str) -> float:
        """How much slower than the base it may be: 0.03 is 3%."""
        now, before = (
            1 + sum(e.share for e in entries if (e.benchmark, e.metric) == (benchmark, metric))
            for entries in (self.entries, self.of_base)
        )
        return max(0.0, now / before - 1)

    def more(self, benchmark: str, metric: str) -> int:
        """How many more than the base it may have."""
        now, before = (
            sum(e.more for e in entries if (e.benchmark, e.metric) == (benchmark, metric))
            for entries in (self.entries, self.of_base)
        )
        return max(0, now - before)

    def is_removed(self, benchmark: str) -> bool:
        """Whether the candidate need not have it."""
        now, before = (
            any(e.removed and e.benchmark == benchmark for e in entries)
            for entries in (self.entries, self.of_base)
        )
        return now and not before

    def check(self, known: Collection[str]) -> None:
        """Raise ValueError for an entry of a benchmark that is not among the known names."""
        for entry in self.entries:
            gone = entry.removed and entry in self.of_base  # no side has it any more
            if entry.benchmark not in known and not gone:
                where = _where(self.path, entry.number, entry.benchmark)
                raise ValueError(
                    f"{where}: there is no such benchmark here: rename or delete the entry, or "
                    f"name the device that has it: device = {' or '.join(map(repr, DEVICES))}"
                )


def load(path: Path, version: str, base: Path | None = None, *, device: str) -> Accepted:
    """The entries of a file for one device of `DEVICES` in a version of the project; none where
    there is no file.

    base: the base's file. Raises ValueError that names the file, the entry and the fix.
    """
    entries, changes = _read(path)
    for entry in entries:
        if not _is_before(version, entry.release):
            where = _where(path, entry.number, entry.benchmark)
            raise ValueError(
                f"{where}: it was accepted until {entry.release}, and this is {version}: "
                "delete the entry, or accept it anew with a reason"
            )
    here, of_base = (
        tuple(entry for entry in read if entry.device in ("", device))
        for read in (entries, () if base is None else _read(base, of_base=True)[0])
    )
    return Accepted(path, here, of_base, changes)


def _read(path: Path, *, of_base: bool = False) -> tuple[tuple[Entry, ...], frozenset[Change]]:
    try:
        content = toml_of(read_regular(path).decode())
    except FileNotFoundError:
        return (), frozenset()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from error
    tables, judging = content.pop("accepted", []), content.pop("judge", [])
    for each in (tables, judging):
        if content or not isinstance(each, list) or not all(isinstance(t, dict) for t in each):
            raise ValueError(f"{path}: use [[accepted]] and [[judge]] tables and nothing else")
    changes = frozenset(_change(f"{path}, judge {n}", t) for n, t in enumerate(judging, 1))
    found: list[Entry] = []
    for number, table in enumerate(tables, 1):
        if of_base and "new" in table:
            continue  # from before a benchmark could be NEW
        where = _where(path, number, table.get("benchmark"))
        entry = replace(_entry(where, table), number=number)
        for earlier in found:
            same = earlier.metric == entry.metric or earlier.removed or entry.removed
            apart = {earlier.device, entry.device} == set(DEVICES)
            if earlier.benchmark == entry.benchmark and same and not apart:
                raise ValueError(f"{where}: the benchmark has two such entries: delete one")
        found.append(entry)
    return tuple(found), changes


def _change(where: str, table: Mapping[str, Any]) -> Change:
    for name in {**dict.fromkeys(JUDGE_KEYS), **table}:
        if name not in JUDGE_KEYS:
            raise ValueError(f"{where}: unknown key {name!r}: use {', '.join(JUDGE_KEYS)}")
        value = table.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: {name} is {value!r}: use a text")
    return Change(table["changed"], table["digest"])


def _where(path: Path, number: int, benchmark: object) -> str:
    return f"{path}, accepted {number} ({benchmark!r})"


def _entry(where: str, table: Mapping[str, Any]) -> Entry:
    if "new" in table:
        raise ValueError(f"{where}: a benchmark that the base lacks is NEW: delete the entry")
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
    if "device" in table and table["device"] not in DEVICES:
        raise ValueError(f"{where}: device is {table['device']!r}: use {' or '.join(DEVICES)}")
    if ("amount" in table) == ("removed" in table):
        raise ValueError(f"{where}: give either amount or removed")
    if table.get("removed", True) is not True:
        raise ValueError(f"{where}: removed is {table['removed']!r}: use true, or an amount")
    if "removed" in table and "metric" in table:
        raise ValueError(f"{where}: what is removed has no metric any more: remove metric")
    metric = table.get("metric", Entry.metric)
    if metric not in METRICS:
        raise ValueError(f"{where}: unknown metric {metric!r}: use {', '.join(METRICS)}")
    amount = table.get("amount", 1)
    number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    whole = metric in COUNTED and isinstance(amount, int)
    if not number or not math.isfinite(amount) or not amount > 0 or not (amount <= 1 or whole):
        raise ValueError(
            f"{where}: amount is {amount!r}: use a share, as 0.03 for 3%, at most 1 (for counts "
            "and bytes also a whole number of how many more)"
        )
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
