"""The tables and lines of README.md: a short ladder, released bugs found, supported versions."""

import json
import re

from field.run import RECORD as RELEASED_BUGS
from tinyllama.harness.machine.parsed import tomllib
from tinyllama.harness.records.entries import StepEntry
from tinyllama.harness.records.results import Record
from tools.model_tables import table
from tools.result_tables import ROOT, newest

GROUPS = ("small-tf32", "small-bf16")
SHOWN = ("v1", "v2", "v3", "v4", "fastest peer", "floor")


def ladder() -> str:
    """For each device a training step of the tiers, the fastest peer and the floor, in `GROUPS`."""
    devices = [{record.group: record for record in records} for records in newest(StepEntry)]
    ladders = [_ladder(groups) for groups in devices if set(GROUPS) <= set(groups)]
    return "\n\n".join(ladders) or "Nothing is recorded yet."


def _ladder(records: dict[str, Record]) -> str:
    columns = [_column(records[group]) for group in GROUPS]
    headers = ["step", *(f"{g}: {what}" for g in GROUPS for what in ("ms", "speed over V1"))]
    rows = ([name, *(cell for column in columns for cell in column[name])] for name in SHOWN)
    sources: dict[str, list[str]] = {}
    for group in GROUPS:
        where, when = _source(records[group])
        sources.setdefault(where, []).append(when)
    measured = "; ".join(
        f"{where}, {', '.join(dict.fromkeys(when))}" for where, when in sources.items()
    )
    return f"{table(headers, rows)}\n\nMeasured on {measured}."


def _column(record: Record) -> dict[str, tuple[str, str]]:
    """Of one group, by row: milliseconds a step, and how many times as fast as V1 that is."""
    timed = [entry for entry in record.of(StepEntry) if entry.ran]
    by_row = {entry.contender: entry for entry in timed}
    peers = [entry for entry in timed if entry.role == "peer"]
    if peers:
        by_row["fastest peer"] = min(peers, key=lambda entry: entry.time)

    def cells(row: str) -> tuple[str, str]:
        if row not in by_row:
            return "not measured", ""
        entry = by_row[row]
        named = f" ({entry.contender})" if row == "fastest peer" else ""
        over_v1 = f"{entry.over_baseline.median:.1f}" if entry.over_baseline else ""
        return f"{entry.time * 1e3:.2f}{named}", "1" if row == entry.baseline else over_v1

    return {row: cells(row) for row in SHOWN}


def _source(record: Record) -> tuple[str, str]:
    """On what a record was measured, and its commit and date."""
    named = ", ".join(f"{name} {record.versions[name]}" for name in ("torch", "triton"))
    return f"{record.device}, {named}", f"commit {record.short_commit} ({record.date[:10]})"


def released_bugs() -> str:
    """How many bugs of released kernels the checks find, by the last run of `field.run`."""
    cases = json.loads(RELEASED_BUGS.read_text(encoding="utf-8"))["cases"]
    detected = [case for case in cases if case["found_by"]]  # the last run found it by all of these
    *first, last = [f"`{library}`" for library in sorted({case["library"] for case in cases})]
    libraries = f"{', '.join(first)} and {last}"
    return (
        f"In released kernels of {libraries}, the checks find\n"
        f"{len(detected)} of {len(cases)} bugs, each from a public issue, "
        "without a hint of\nwhere to look; more in the newest releases: "
        "[docs/FIELD.md](docs/FIELD.md)."
    )


def versions() -> str:
    """What is supported, what CI installs, and what the figures were measured with."""
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    python = [line for line in project["classifiers"] if "Python :: 3." in line]
    first, last = (line.rpartition(" ")[2] for line in (python[0], python[-1]))
    torch, triton = project["dependencies"][0], project["optional-dependencies"]["triton"][0]
    lanes = set(re.findall(r'python-version: "(.*)"', _text(".github/workflows/ci.yml")))
    oldest, newer = sorted(lanes, key=lambda lane: [int(part) for part in lane.split(".")])
    floor, latest = _pinned("floor"), _pinned("newest")
    records = [record for group in newest(StepEntry) for record in group]

    def measured(name: str) -> str:
        return ", ".join(dict.fromkeys(record.versions[name] for record in records))

    rows = [["Python", f"{first} to {last}", oldest, newer, measured("python")]]
    for name, needed in (("torch", torch), ("triton", triton)):
        least = f"{needed.removeprefix(f'{name}>=').partition(';')[0]} or later"
        rows.append([name, least, floor[name], latest[name], measured(name)])
    devices = ", ".join(dict.fromkeys(record.device for record in records))
    rows.append(["device", "CPU, CUDA or ROCm GPU", "CPU", "CPU", devices])
    return table(["", "supported", "oldest in CI", "newest in CI", "figures measured with"], rows)


def _pinned(name: str) -> dict[str, str]:
    """The versions of torch and triton in a file of constraints."""
    text = _text(f"constraints/{name}.txt")
    return {
        name: re.sub(r"[=<>]", "", pin).replace(",", " to ")
        for name, pin in re.findall(r"^(torch|triton)([=<>].*)$", text, re.MULTILINE)
    }


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
