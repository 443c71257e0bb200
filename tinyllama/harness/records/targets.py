"""Targets as data: claims of documents and bars of a project, and whether entries meet them.

A target is a line such as ``v3, v4 speed over fastest peer >= 1.25 (aim 1.3)``: of whom, a field of
their entries or ``speed``, by whose it is divided, the bound, and a caveat for the reader of a
miss. A file of targets has them in tables:

    [[step]]
    about = { workload = "medium", precision = ["fp32", "bf16"] }
    device = "H200"
    bars = ["v3 speed over fastest peer >= 1.0"]

about: fields of the entries (of a ``step``, or an ``op``) -> the values that the bars are about.
device: parts of the names of the devices on which they are asserted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec

from tinyllama.harness.machine.parsed import toml_of
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry, Timed

SPEED = "speed"  # the inverse of seconds
FASTEST_PEER = "fastest peer"
_LINE = re.compile(
    r"(?P<who>\S+(, \S+)*) (?P<metric>\w+)( over (?P<over>.+?))? (?P<direction>>=|<=) "
    r"(?P<bound>\d+(\.\d+)?)(?P<unit> MiB)?( \((?P<caveat>.+)\))?"
)
_FORM = "WHO METRIC [over WHOM] >= BOUND [(CAVEAT)], or <="


class TargetError(ValueError):
    """A target that cannot be used; the message names file, table, line and fix."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on a metric of one contender, or of one provider of ops.

    over: by whose metric it is divided; of several names, the fastest that ran.
    about: fields of the entries that it covers -> their values; a field that is not named may have
    any. device: parts of the names of the devices on which it is asserted; of all, if empty.
    """

    kind: type[Timed]
    who: str
    metric: str
    direction: str  # ">=" or "<="
    bound: float
    over: tuple[str, ...] = ()
    about: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    device: tuple[str, ...] = ()
    caveat: str = ""

    def __str__(self) -> str:
        over = f" over {' / '.join(self.over)}" if self.over else ""
        return f"{self.who} {self.metric}{over} {self.direction} {self.bound:g}"

    def covers(self, entry: Timed) -> bool:
        """Whether it is about the call of an entry, on whatever device."""
        fields = self.about.items()
        return isinstance(entry, self.kind) and all(
            getattr(entry, f) in names for f, names in fields
        )

    def concerns(self, device: str) -> bool:
        """Whether it is about a device of that name, and so is asserted there."""
        return not self.device or any(part.lower() in device.lower() for part in self.device)

    def measured(self, entries: Mapping[str, Timed]) -> Ratio | None:
        """Its metric in some entries, by who was measured; None where they lack it.

        A ratio of times is measured round by round and has an interval. Of counts, and where
        entries hold only medians, both ends of the interval are the value itself.
        """
        entry = entries.get(self.who)
        if entry is None:
            return None
        value = _value(entry, self.metric)
        if not self.over:
            return None if value is None else Ratio(value, value, value)
        rival = self._rival(entries)
        if rival is None:
            return None
        if self.metric == SPEED and rival.who in (entry.over or {}):
            return (entry.over or {})[rival.who]
        divisor = _value(rival, self.metric)
        return Ratio(*[value / divisor] * 3) if value is not None and divisor else None

    def _rival(self, entries: Mapping[str, Timed]) -> Timed | None:
        """The entry that its metric is divided by: the fastest of those that ran."""
        if len(self.over) == 1 and self.over[0] != FASTEST_PEER:
            return entries.get(self.over[0])
        peers = self.over == (FASTEST_PEER,)
        rivals = [
            e for e in entries.values() if (e.role == "peer" if peers else e.who in self.over)
        ]
        return min((e for e in rivals if e.ran), key=lambda entry: entry.time, default=None)

    def met(self, ratio: Ratio) -> bool:
        """Whether the median of a measurement meets the bound; the interval is only shown."""
        if self.direction == ">=":
            return ratio.median >= self.bound
        return ratio.median <= self.bound


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


def judged(target: Target, ratio: Ratio | None, device: str, why: str = "", about: str = "") -> Bar:
    """A target and its measurement on a device of that name. One that is missed says its caveat, if
    it has one. why: it does not apply, if anything."""
    if not target.concerns(device):
        why = f"it is about {' and '.join(target.device)}, and this is {device}"
    if why:
        return Bar(Standing.NOT_APPLICABLE, f"{about}{target}: {why}")
    met = ratio is not None and target.met(ratio)
    caveat = f" ({target.caveat})" if target.caveat and not met else ""
    text = f"{about}{target}: measured {figure_text(ratio, target.bound)}{caveat}"
    return Bar(Standing.MET if met else Standing.MISSED, text)


def covered(
    targets: Iterable[Target], entries: Iterable[Timed]
) -> Iterator[tuple[Target, tuple[str, ...], dict[str, Timed]]]:
    """Each target with each call that it covers and the entries of that, by who was measured."""
    calls: dict[tuple[str, ...], dict[str, Timed]] = {}
    for entry in entries:
        calls.setdefault(entry.call, {})[entry.who] = entry
    for target in targets:
        for call, of_call in calls.items():
            if target.covers(next(iter(of_call.values()))):
                yield target, call, of_call


def _value(entry: Timed, metric: str) -> float | None:
    if metric == SPEED:
        return 1 / entry.seconds if entry.seconds else None
    return getattr(entry, metric, None)


def figure_text(ratio: Ratio | None, bound: float = 0.0) -> str:
    """A measurement as text, with its interval where it has one, in as many digits as it takes to
    see on which side of its bound it is."""
    if ratio is None:
        return "nothing that tells"
    digits = 3
    while digits < 9 and f"{ratio.median:.{digits}g}" == f"{bound:.{digits}g}":
        if ratio.median == bound:
            break
        digits += 1
    if ratio.low == ratio.high:
        return f"{ratio.median:.{digits}g}"
    return f"{ratio.median:.{digits}f} [{ratio.low:.3f}, {ratio.high:.3f}]"


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    bars: Annotated[list[str], msgspec.Meta(min_length=1)]
    about: dict[str, str | list[str]] = {}
    device: str | list[str] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    step: list[_Table] = []
    op: list[_Table] = []


def load(path: Path) -> list[Target]:
    """The targets in a file. Raises TargetError for one that cannot be used."""
    try:
        content = msgspec.convert(toml_of(path.read_text(encoding="utf-8")), _File)
    except (OSError, ValueError) as error:
        raise TargetError(f"{path}: {error}") from error
    targets: list[Target] = []
    for number, table in enumerate(content.step, 1):
        targets += _of_table(f"{path}, step {number}", StepEntry, table)
    for number, table in enumerate(content.op, 1):
        targets += _of_table(f"{path}, op {number}", OpEntry, table)
    return targets


def _of_table(where: str, kind: type[Timed], table: _Table) -> Iterator[Target]:
    about = {name: _names(value) for name, value in table.about.items()}
    if wrong := about.keys() - set(kind.__struct_fields__):
        raise TargetError(f"{where}: {min(wrong)!r} is no field of {kind.__name__}")
    for line in table.bars:
        match = _LINE.fullmatch(line)
        if match is None:
            raise TargetError(f"{where}: {line!r}: write {_FORM}")
        metric, over = match["metric"], match["over"]
        if metric != SPEED and not hasattr(kind, metric):
            raise TargetError(f"{where}: {line!r}: {metric!r} is no field of {kind.__name__}")
        if metric == SPEED and over is None:
            raise TargetError(f"{where}: {line!r}: a speed is a ratio: say over what")
        for who in match["who"].split(", "):
            yield Target(
                kind=kind,
                who=who,
                metric=metric,
                direction=match["direction"],
                bound=float(match["bound"]) * (2**20 if match["unit"] else 1),
                over=tuple(over.split(" / ")) if over else (),
                about=about,
                device=_names(table.device),
                caveat=match["caveat"] or "",
            )


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
