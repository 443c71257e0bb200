"""What a reader needs to trust a device's figures: machine, versions, records, omissions."""

from collections.abc import Mapping, Sequence

from tinyllama.harness.page.tables import Table, texts
from tinyllama.harness.records.entries import Contended, SweepEntry
from tinyllama.harness.records.numbers import MISSING
from tinyllama.harness.records.results import Record


def machine(record: Record) -> tuple[tuple[str, str], ...]:
    """The machine and the versions of the newest record."""
    machine = record.machine
    clocks = _clocks(machine.get("clocks_mhz", {}))
    memory = machine.get("memory_bytes")
    host = [machine.get("processor"), f"{machine['cores']} cores" if "cores" in machine else None]
    host.append(f"{memory / 2**30:.0f} GiB" if memory else None)
    host.append(machine.get("system"))
    power = machine.get("power_limit_watts")
    facts = {
        "driver": machine.get("driver"),
        "clocks": clocks,
        "power limit": f"{power:g} W" if power else None,
        "host": ", ".join(str(word) for word in host if word),
        "versions": record.software,
        "commit": record.short_commit,
        "date": record.date.replace("T", " ").replace("Z", " UTC"),
        "command": record.command,
        "schema": str(record.schema),
    }
    return tuple((name, str(fact or "not recorded")) for name, fact in facts.items())


def _clocks(megahertz: Mapping[str, float]) -> str:
    """Each clock at the end of the run, and its highest."""
    now = [name for name in megahertz if not name.endswith("_max")]
    highest = {name: megahertz.get(f"{name}_max", "?") for name in now}
    words = [f"{name} {megahertz[name]} of {highest[name]} MHz" for name in now]
    rest = [n for n in megahertz if n.endswith("_max") and n.removesuffix("_max") not in now]
    return ", ".join([*words, *(f"{name} {megahertz[name]} MHz" for name in rest)])


def sources(used: Sequence[Record]) -> Table:
    """The records that a device's sections are made from."""
    names = ("group", "date, UTC", "commit", "versions", "driver", "command", "schema")
    rows = []
    for record in used:
        date, driver = record.date[:16].replace("T", " "), record.machine.get("driver", MISSING)
        found = (record.group, date, record.short_commit, record.software, str(driver))
        rows.append((*found, record.command, str(record.schema)))
    return texts("Records behind this section", names, rows, folded=True)


def left_out(records: Sequence[Record], used: Sequence[Record]) -> tuple[str, ...]:
    """What did not run or was not measured, and why; then the records that are not shown."""
    words: dict[str, list[str]] = {}
    for record in used:
        for entry in record.entries:
            ways = entry.left_out if isinstance(entry, Contended) else None
            for way, reason in (ways or {}).items():
                words.setdefault(f"without {way}: {reason}", []).append(entry.who)
            for what, reason in (entry.unavailable or {}).items():
                words.setdefault(f"{what} not measured: {reason}", []).append(entry.who)
            if entry.cannot is not None and not isinstance(entry, SweepEntry):
                words.setdefault(f"cannot run: {entry.cannot}", []).append(entry.who)
    lines = [f"{', '.join(dict.fromkeys(who))} {what}" for what, who in words.items()]
    partial = [f"{r.group} of {r.date[:10]}" for r in records if not r.complete]
    if partial:
        lines.append(f"incomplete and not shown: {', '.join(partial)}")
    return tuple(lines)
