"""Targets as data: claims of documents and bars of a project, and whether entries meet them."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
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
INTERVAL, MEDIAN = "interval", "median"


class TargetError(ValueError):
    """A target that cannot be used; the message names file, target and fix."""


# What a key takes that may hold several names.
ANY_NAMES, NAMES = 'a name, a list of names, or "any"', "a name, or a list of names"


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A bound on a metric of one contender; the fields are explained in targets.toml."""

    CONTENDER: ClassVar[str]  # the field that names it
    METRICS: ClassVar[tuple[str, ...]]
    CALL: ClassVar[tuple[str, ...]]  # the fields that say what it is about, as in `Timed.call`
    LISTS: ClassVar[Mapping[str, str]]  # fields of several names, () for "any", and what they take

    metric: str
    device: tuple[str, ...]  # parts of names; empty for any
    source: str
    at_least: float | None = None
    at_most: float | None = None
    over: str | tuple[str, ...] | None = None
    judged_by: str = INTERVAL
    caveat: str = ""
    known_misses: tuple[tuple[str, float], ...] = ()

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
        """Whether a measurement meets the bound: at the worse end of its interval, or by its median
        where the target says so."""
        median, low, high = found
        if self.judged_by == MEDIAN:
            low = high = median
        if self.at_least is not None:
            return low >= self.at_least
        return high <= self.bound

    def held_to(self, device: str) -> float | None:
        """The bound that is asserted on a device of that name while this one is missed there, as
        is known; None where no miss is known."""
        each = (held for name, held in self.known_misses if name.lower() in device.lower())
        return next(each, None)


class Standing(Enum):
    """What a run says of a bar."""

    MET = "MET"
    MISSED = "MISSED"
    KNOWN_MISS = "KNOWN MISS"  # missed as `known_misses` says, and no worse
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
    it has one, and what a known miss is held to. why: it does not apply, if anything."""
    if not target.concerns(device):
        why = f"it is about {target.where}, and this is {device}"
    if why:
        return Bar(Standing.NOT_APPLICABLE, f"{about}{target}: {why}")
    met = found is not None and target.met(found)
    caveat = f" ({target.caveat})" if target.caveat and not met else ""
    text = f"{about}{target}: measured {shown(found)}{caveat}"
    if met:
        return Bar(Standing.MET, text)
    if (held := target.held_to(device)) is None:
        return Bar(Standing.MISSED, text)
    least, most = (held, None) if target.at_most is None else (None, held)
    known = found is not None and replace(target, at_least=least, at_most=most).met(found)
    text += f"; a known miss, held to {target.direction} {held:g}"
    return Bar(Standing.KNOWN_MISS if known else Standing.MISSED, text)


@dataclass(frozen=True, kw_only=True)
class Target(Bounded):
    """A bound on a training step of one tier.

    workload, precision: those it is for; empty for all.
    """

    CONTENDER = "tier"
    METRICS = METRICS
    CALL = ("workload", "precision")
    LISTS: ClassVar[Mapping[str, str]] = dict.fromkeys((*CALL, "device"), ANY_NAMES)

    tier: str
    workload: tuple[str, ...]
    precision: tuple[str, ...]
    documented: bool = False


@dataclass(frozen=True, kw_only=True)
class OpTarget(Bounded):
    """A bound on one provider of ops, at each of their cases on its own.

    op, case, dtype: those it is for; empty for all.
    """

    CONTENDER = "provider"
    METRICS = OP_METRICS
    CALL = ("op", "case", "dtype", "passes")
    LISTS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((*CALL[:3], "device"), ANY_NAMES),
        "over": NAMES,
    }

    op: tuple[str, ...]
    provider: str
    case: tuple[str, ...]
    dtype: tuple[str, ...]
    passes: str


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
    found: list[Kind] = []
    for number, table in enumerate(_tables(path).get(key, ()), 1):
        target = _target(kind, f"{path}, {key} {number}", table)
        if target in found:
            raise TargetError(f"{path}, {key} {number}: {target} is there twice: remove one")
        found.append(target)
    return found


def _tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables of a file by their name."""
    try:
        data = toml_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"{path}: {error}") from error
    several = all(
        isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
        for tables in data.values()
    )
    if not data or not set(data) <= {"target", "op"} or not several:
        raise TargetError(f"{path}: use [[target]] and [[op]] tables and nothing else")
    return data


def _target(kind: type[Kind], where: str, table: Mapping[str, Any]) -> Kind:
    known = {field.name: field for field in fields(kind)}
    for name in sorted(set(table) - set(known)):
        raise TargetError(f"{where}: unknown key {name!r}: use {', '.join(sorted(known))}")
    for name, field in known.items():
        if field.default is MISSING and name not in table:
            raise TargetError(f"{where}: it lacks {name!r}: add it")
    for name, value in table.items():
        if wrong := _mistyped(name, value, kind.LISTS.get(name)):
            raise TargetError(f"{where}: {name} is {value!r}: use {wrong}")
    if ("at_least" in table) == ("at_most" in table):
        raise TargetError(f"{where}: give at_least or at_most, and not both")
    way = "at_least" if "at_least" in table else "at_most"
    bound = _in_bytes(table[way]) if str(table.get("metric")).endswith("bytes") else table[way]
    number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
    if not number or not math.isfinite(bound) or bound <= 0:
        raise TargetError(
            f"{where}: its bound is {bound!r}: use a number above 0, or of bytes '522.3 MiB'"
        )
    if table["metric"] not in kind.METRICS:
        raise TargetError(
            f"{where}: unknown metric {table['metric']!r}: use {', '.join(kind.METRICS)}"
        )
    if table["metric"] == SPEED and "over" not in table:
        raise TargetError(f"{where}: a speed is a ratio: say over what")
    if table.get("judged_by", INTERVAL) not in (INTERVAL, MEDIAN):
        raise TargetError(
            f"{where}: judged_by is {table['judged_by']!r}: use {INTERVAL} or {MEDIAN}"
        )
    lists = {name: _listed(table[name]) for name in kind.LISTS if name in table}
    misses = tuple(table.get("known_misses", {}).items())
    target = kind(**{**table, way: bound, **lists, "known_misses": misses})
    if misses and (wrong := _not_a_known_miss(target, misses)):
        raise TargetError(f"{where}: known_misses: {wrong}")
    return target


def _not_a_known_miss(target: Bounded, misses: Iterable[tuple[str, Any]]) -> str:
    """What is wrong with the misses that a target says are known; empty where nothing is."""
    if getattr(target, "documented", False):
        return "a claim of the documents is held as it is: remove the key"
    if not target.caveat:
        return "say in caveat why the bar is missed"
    for name, held in misses:
        if not target.concerns(name):
            return f"the bar is not about {name}: use {target.where}"
        number = isinstance(held, (int, float)) and not isinstance(held, bool)
        if not number or not 0 < held < math.inf:
            return f"{name} is {held!r}: use a number above 0"
        if target.met(Ratio(held, held, held)):
            return f"{name} is {held!r}, which meets {target.direction} {target.bound:g}: remove it"
    return ""


def _in_bytes(bound: Any) -> Any:
    """A bound in bytes, of a text such as ``522.3 MiB``; anything else as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) MiB", bound) if isinstance(bound, str) else None
    return bound if match is None else float(match[1]) * 2**20


def _mistyped(name: str, value: Any, several: str | None) -> str | None:
    """What a key takes, where this value is of another kind; None where it is not. Bounds are
    checked elsewhere.

    several: what the key takes, in words, where that may be a list of names.
    """
    if name in ("at_least", "at_most"):
        return None
    if name == "known_misses":
        return None if isinstance(value, dict) and value else "a table: device = bound"
    if name == "documented":
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, str) and (value or name == "caveat"):
        return several if value == ANY and several == NAMES else None
    if several is None:
        return "a text"
    names = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    return None if names and ANY not in value else several


def _listed(value: str | Iterable[str]) -> tuple[str, ...]:
    if value == ANY:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
