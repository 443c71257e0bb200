"""Targets as data: claims of documents and bars of a project, and whether entries meet them."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tinyllama.harness.machine.parsed import toml_of
from tinyllama.harness.records.entries import Ratio, Timed

SPEED = "speed"
FASTEST_PEER = "fastest peer"
METRICS = (
    SPEED,
    "samples_per_second",
    "live_bytes",
    "peak_bytes",
    "held_bytes",
    "held_peak_bytes",
    "kernels",
    "joules_per_sample",
    "mfu",
    "copies",
    "gradient_share",
)
OP_METRICS = (
    SPEED,
    "bandwidth_share",
    "peak_bytes",
    "kernels",
    "host_seconds",
    "repeated_host_seconds",
)
ANY = "any"
PROJECT = "project"  # the source of a bar that is no claim of the documents


class TargetError(ValueError):
    """A target that cannot be used; the message names file, target and fix."""


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A bound on a metric of one contender; the fields are explained in targets.toml."""

    CONTENDER: ClassVar[str]  # the field that names it
    METRICS: ClassVar[tuple[str, ...]]
    CALL: ClassVar[tuple[str, ...]]  # the fields that say what it is about, as in `Timed.call`
    LISTS: ClassVar[tuple[str, ...]]  # fields of several names; empty: of all

    metric: str
    device: tuple[str, ...] = ()  # parts of names
    source: str = PROJECT
    at_least: float | None = None
    at_most: float | None = None
    over: str | tuple[str, ...] | None = None
    caveat: str = ""

    @property
    def contender(self) -> str:
        """Whose metric it is."""
        return str(getattr(self, self.CONTENDER))

    @property
    def bound(self) -> float:
        bound = self.at_least if self.at_least is not None else self.at_most
        assert bound is not None
        return bound

    @property
    def direction(self) -> str:
        return ">=" if self.at_least is not None else "<="

    def __str__(self) -> str:
        over = " / ".join(self.over) if isinstance(self.over, tuple) else self.over
        beside = f" over {over}" if over else ""
        return f"{self.contender} {self.metric}{beside} {self.direction} {self.bound:g}"

    def covers(self, call: tuple[str, ...]) -> bool:
        """Whether it is about a call (`Timed.call`), on whatever device."""
        named = (_listed(getattr(self, name)) for name in self.CALL)
        return all(not names or part in names for part, names in zip(call, named, strict=True))

    def concerns(self, device: str) -> bool:
        """Whether it is about a device of that name, and so is asserted there."""
        return not self.device or any(name.lower() in device.lower() for name in self.device)

    @property
    def where(self) -> str:
        """The devices that it is about, as text."""
        return " and ".join(self.device) or ANY

    def never_run(self, devices: Iterable[str]) -> str:
        """The remark on its figure while none of these devices is the one that it is about; empty
        where one is."""
        run = any(self.concerns(device) for device in devices)
        return "" if run else f"never run on {self.where} hardware"

    def measured(self, entries: Mapping[str, Timed]) -> Ratio | None:
        """Its metric in some entries, by contender; None where they lack it.

        A ratio of times is measured round by round and has an interval. Of counts, and where
        entries hold only medians, both ends of the interval are the value itself.
        """
        own = entries.get(self.contender)
        if own is None:
            return None
        if self.over is None:
            return _exactly(_value(own, self.metric))
        other = self._other(entries)
        if other is None:
            return None
        if self.metric == SPEED and other in (own.over or {}):
            return (own.over or {})[other]
        mine, theirs = _value(own, self.metric), _value(entries.get(other), self.metric)
        return _exactly(mine / theirs) if mine is not None and theirs else None

    def _other(self, entries: Mapping[str, Timed]) -> str | None:
        if isinstance(self.over, str) and self.over != FASTEST_PEER:
            return self.over
        ran = {
            name: entry.seconds
            for name, entry in entries.items()
            if entry.seconds is not None
            if (name in self.over if isinstance(self.over, tuple) else entry.role == "peer")
        }
        return min(ran, key=lambda name: ran[name], default=None)

    def met(self, found: Ratio) -> bool:
        """Whether the median of a measurement meets the bound; the interval is only shown."""
        if self.at_least is not None:
            return found.median >= self.at_least
        return found.median <= self.bound


class Standing(Enum):
    """What a run says of a bar."""

    MET = "MET"
    MISSED = "MISSED"
    NOT_APPLICABLE = "NOT APPLICABLE"


@dataclass(frozen=True)
class Bar:
    """What a run says of one target, and the figures or the reason."""

    standing: Standing
    text: str

    def __str__(self) -> str:
        return f"{self.standing.value} {self.text}"


def judged(
    target: Bounded, found: Ratio | None, device: str, why: str = "", about: str = ""
) -> Bar:
    """A target and its measurement on a device of that name. One that is missed says its caveat, if
    it has one. why: it does not apply, if anything."""
    if not target.concerns(device):
        why = f"it is about {target.where}, and this is {device}"
    if why:
        return Bar(Standing.NOT_APPLICABLE, f"{about}{target}: {why}")
    met = found is not None and target.met(found)
    caveat = f" ({target.caveat})" if target.caveat and not met else ""
    text = f"{about}{target}: measured {shown(found)}{caveat}"
    return Bar(Standing.MET if met else Standing.MISSED, text)


@dataclass(frozen=True, kw_only=True)
class Target(Bounded):
    """A bound on a training step of one tier.

    workload, precision: those it is for; empty for all.
    """

    CONTENDER = "tier"
    METRICS = METRICS
    CALL = ("workload", "precision")
    LISTS = (*CALL, "device")

    tier: str
    workload: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()

    @property
    def documented(self) -> bool:
        """Whether it is a claim of the published documents."""
        return self.source != PROJECT


@dataclass(frozen=True, kw_only=True)
class OpTarget(Bounded):
    """A bound on one provider of ops, at each of their cases on its own.

    op, case, dtype: those it is for; empty for all.
    """

    CONTENDER = "provider"
    METRICS = OP_METRICS
    CALL = ("op", "case", "dtype", "passes")
    LISTS = (*CALL[:3], "device", "over")

    provider: str
    passes: str
    op: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()


Kind = TypeVar("Kind", Target, OpTarget)
Timing = TypeVar("Timing", bound=Timed)


def covered(
    targets: Iterable[Kind], entries: Iterable[Timing]
) -> Iterator[tuple[Kind, tuple[str, ...], dict[str, Timing]]]:
    """Each target with each call that it covers and the entries of that, by who was measured."""
    calls: dict[tuple[str, ...], dict[str, Timing]] = {}
    for entry in entries:
        calls.setdefault(entry.call, {})[entry.who] = entry
    for target in targets:
        yield from ((target, call, own) for call, own in calls.items() if target.covers(call))


def _value(entry: Timed | None, metric: str) -> float | None:
    if metric == SPEED:
        return 1 / entry.seconds if entry and entry.seconds else None
    return getattr(entry, metric, None)


def shown(found: Ratio | None) -> str:
    """A measurement as text, with its interval where it has one."""
    if found is None:
        return "nothing that tells"
    median, low, high = found
    return f"{median:.3g}" if low == high else f"{median:.3f} [{low:.3f}, {high:.3f}]"


def _exactly(value: float | None) -> Ratio | None:
    return None if value is None else Ratio(value, value, value)


def load(path: Path) -> list[Target]:
    """The targets of steps in a file. Raises TargetError for one that cannot be used."""
    return _load(path, "target", Target)


def load_ops(path: Path) -> list[OpTarget]:
    """The targets of ops in a file. Raises TargetError for one that cannot be used."""
    return _load(path, "op", OpTarget)


def _load(path: Path, key: str, kind: type[Kind]) -> list[Kind]:
    try:
        tables = toml_of(path.read_text(encoding="utf-8")).get(key, [])
    except (OSError, ValueError) as error:
        raise TargetError(f"{path}: {error}") from error
    return [
        target
        for number, table in enumerate(tables, 1)
        for target in _targets(kind, f"{path}, {key} {number}", table)
    ]


def _targets(kind: type[Kind], where: str, table: Mapping[str, Any]) -> Iterator[Kind]:
    """The targets of a table: one for each contender that it names."""
    known = {field.name: field for field in fields(kind)}
    for name in sorted(set(table) - set(known)):
        raise TargetError(f"{where}: unknown key {name!r}: use {', '.join(sorted(known))}")
    for name, field in known.items():
        if field.default is MISSING and name not in table:
            raise TargetError(f"{where}: it lacks {name!r}: add it")
    if ("at_least" in table) == ("at_most" in table):
        raise TargetError(f"{where}: give at_least or at_most, and not both")
    way = "at_least" if "at_least" in table else "at_most"
    bound = _in_bytes(table[way])
    if not isinstance(bound, (int, float)) or not 0 < bound < math.inf:
        raise TargetError(
            f"{where}: its bound is {bound!r}: use a number above 0, or of bytes '522.3 MiB'"
        )
    if table["metric"] not in kind.METRICS:
        raise TargetError(
            f"{where}: unknown metric {table['metric']!r}: use {', '.join(kind.METRICS)}"
        )
    if table["metric"] == SPEED and "over" not in table:
        raise TargetError(f"{where}: a speed is a ratio: say over what")
    lists = {name: _listed(table[name]) for name in kind.LISTS if name in table}
    for contender in _listed(table[kind.CONTENDER]):
        yield kind(**{**table, way: bound, **lists, kind.CONTENDER: contender})


def _in_bytes(bound: Any) -> Any:
    """A bound in bytes, of a text such as ``522.3 MiB``; anything else as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) MiB", bound) if isinstance(bound, str) else None
    return bound if match is None else float(match[1]) * 2**20


def _listed(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
