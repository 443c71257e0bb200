"""Which records a page shows: by device, by what was measured together, by date."""

from collections.abc import Iterable
from typing import TypeVar

from tinyllama.harness.page.keys import SHOWN
from tinyllama.harness.records.entries import OpEntry, Timed
from tinyllama.harness.records.results import Record

E = TypeVar("E", bound=Timed)
Key = tuple[str, ...]
ROLES = {"floor": 0, "tier": 1, "peer": 2}


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Device -> its records, oldest first; devices without a record that a page shows come last."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (record.date, record.group, record.commit)):
        found.setdefault(record.device, []).append(record)
    return dict(sorted(found.items(), key=lambda each: (not any(map(shown, each[1])), each[0])))


def shown(record: Record) -> bool:
    """Whether a page has rows of a record."""
    return record.complete and any(isinstance(entry, SHOWN) for entry in record.entries)


def history(records: Iterable[Record], kind: type[Timed]) -> dict[Key, list[Record]]:
    """Group -> the complete records that measured it, oldest first; small groups first.

    A group is what the entries say (`Timed.group`), not ``Record.group``: a record of the first
    schema held every group.
    """
    found: dict[Key, list[Record]] = {}
    for record in records:
        for group in dict.fromkeys(e.group for e in record.of(kind)) if record.complete else ():
            found.setdefault(group, []).append(record)
    least = {group: _least(entries(runs[-1], kind, group)) for group, runs in found.items()}
    size = {group: min(least[other] for other in found if other[0] == group[0]) for group in found}
    return {group: found[group] for group in sorted(found, key=lambda g: (size[g], least[g], g))}


def _least(found: Iterable[Timed]) -> float:
    """Seconds of the fastest entry: by it groups are put in order."""
    return min((entry.time for entry in measured(found)), default=0.0)


def entries(record: Record, kind: type[E], group: Key) -> list[E]:
    """The entries of one group, steps and sweeps in the order of a ladder."""
    found = [entry for entry in record.of(kind) if entry.group == group]
    return found if issubclass(kind, OpEntry) else sorted(found, key=_rung)


def _rung(entry: Timed) -> tuple[int, float, str]:
    """The floor, the tiers by name, the peers by time; what cannot run comes last of its role."""
    peer = entry.role == "peer" and entry.kind == "step"
    time = entry.time if peer else 0.0
    return ROLES.get(entry.role or "", len(ROLES)), time, entry.who


def measured(found: Iterable[E]) -> list[E]:
    """Those that ran, and have a time to divide by."""
    return [entry for entry in found if entry.ran and entry.time > 0]


def fastest(found: Iterable[E], role: str) -> E | None:
    """The fastest that ran, of one role."""
    return min((e for e in measured(found) if e.role == role), key=lambda e: e.time, default=None)
