"""Which records a page shows: by device, by what was measured together, by date."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tinyllama.harness.records.results import Record

Entry = dict[str, Any]
Key = tuple[str, ...]

STEP = ("workload", "precision")
GROUPING: dict[str, Key] = {"step": STEP, "sweep": STEP, "op": ("dtype",)}
ROLES = {"floor": 0, "tier": 1, "peer": 2}


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Device -> its records, oldest first."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (record.date, record.group, record.commit)):
        found.setdefault(record.device, []).append(record)
    return dict(sorted(found.items()))


def history(records: Iterable[Record], kind: str) -> dict[Key, list[Record]]:
    """Group -> the complete records that measured it, oldest first; small groups first.

    A group is what ``GROUPING`` says of the kind, not ``Record.group``: a record of the first
    schema held every group.
    """
    found: dict[Key, list[Record]] = {}
    for record in records:
        keys = dict.fromkeys(key(entry) for entry in record.entries if entry["kind"] == kind)
        for group in keys if record.complete else ():
            found.setdefault(group, []).append(record)
    least = {group: _least(runs[-1], kind, group) for group, runs in found.items()}
    size = {group: min(least[other] for other in found if other[0] == group[0]) for group in found}
    return {group: found[group] for group in sorted(found, key=lambda g: (size[g], least[g], g))}


def _least(record: Record, kind: str, group: Key) -> float:
    """Seconds of the fastest entry of a group: by it groups are put in order."""
    return min((e["seconds"] for e in measured(entries(record, kind, group))), default=0.0)


def key(entry: Entry) -> Key:
    return tuple(str(entry[name]) for name in GROUPING[entry["kind"]])


def entries(record: Record, kind: str, group: Key) -> list[Entry]:
    """The entries of one group, steps and sweeps in the order of a ladder."""
    found = [e for e in record.entries if e["kind"] == kind and key(e) == group]
    return found if kind == "op" else sorted(found, key=_rung)


def _rung(entry: Entry) -> tuple[int, float, str]:
    """The floor, the tiers by name, the peers by time; what cannot run comes last of its role."""
    role = ROLES.get(entry["role"], len(ROLES))
    peer = entry["role"] == "peer" and entry["kind"] == "step"
    return role, entry.get("seconds", float("inf")) if peer else 0.0, entry["contender"]


def measured(found: Iterable[Entry]) -> list[Entry]:
    """Those that ran."""
    return [entry for entry in found if "seconds" in entry and "cannot" not in entry]


def fastest(found: Iterable[Entry], role: str) -> Entry | None:
    """The fastest that ran, of one role."""
    ran = [entry for entry in measured(found) if entry["role"] == role]
    return min(ran, key=lambda entry: entry["seconds"], default=None)


def contenders(records: Iterable[Record], role: str) -> list[str]:
    """Every contender of a role, by name: the order in which colours and shapes are dealt."""
    return sorted(
        {
            e["contender"]
            for r in records
            for e in r.entries
            if e.get("role") == role and "contender" in e
        }
    )


def providers(records: Iterable[Record], role: str) -> list[str]:
    """Every provider of a role ("ours", "peer"), by name."""
    return sorted(
        {
            e["provider"]
            for r in records
            for e in r.entries
            if e.get("role") == role and "provider" in e
        }
    )


def changes(before: Record, after: Record) -> list[str]:
    """What differs between the versions of two records, in words."""
    names = dict.fromkeys([*before.versions, *after.versions])
    return [
        f"{name} {before.versions.get(name, 'absent')} → {after.versions.get(name, 'absent')}"
        for name in names
        if before.versions.get(name) != after.versions.get(name)
    ]


def has_run(records: Sequence[Record], device: str) -> bool:
    """Whether any record is of a device of that name, or of one whose name contains it."""
    return any(device in record.device for record in records)
