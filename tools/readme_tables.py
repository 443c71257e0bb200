"""The lines and the table of README.md: released bugs that are found, supported versions."""

import json
import re

from field.run import RECORD as RELEASED_BUGS
from tinyllama.harness.machine.parsed import tomllib
from tinyllama.harness.records.entries import StepEntry
from tools.model_tables import table
from tools.result_tables import ROOT, newest


def released_bugs() -> str:
    """How many bugs of released kernels the checks find, by the last run of `field.run`."""
    record = json.loads(RELEASED_BUGS.read_text(encoding="utf-8"))
    cases = record["cases"]
    detected = [case for case in cases if case["found_by"]]  # the last run found it by all of these
    *first, last = [f"`{library}`" for library in sorted({case["library"] for case in cases})]
    libraries = f"{', '.join(first)} and {last}"
    return (
        f"In released kernels of {libraries}, the checks of\n{record['date']} found "
        f"{len(detected)} of {len(cases)} bugs, each from a public issue, without a hint of\n"
        "where to look; more in the newest releases: [docs/FIELD.md](docs/FIELD.md)."
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
