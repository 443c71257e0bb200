"""Tables of measurements, from the records under results/ and from nothing else.

Only records that git tracks count: what somebody measured on their own machine must not make
the documents stale.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tinyllama.harness.report import markdown, parts_markdown
from tinyllama.harness.results import Record, load

ROOT = Path(__file__).resolve().parent.parent


def ladder() -> str:
    """The newest timings of the tiers on each device that has a record."""
    return "\n\n".join(markdown(record) for record in newest("step/"))


def parts() -> str:
    """The newest timings of V2 with each of its parts switched off."""
    return "\n\n".join(parts_markdown(record) for record in newest("parts/"))


def newest(prefix: str) -> list[Record]:
    """For each device its newest complete record with entries of this kind."""
    listed = subprocess.run(
        ["git", "ls-files", "results/*/*.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")[:-1]
    paths = [ROOT / name for name in listed] or ROOT.glob(
        "results/*/*.json"
    )  # an export has no git
    found = sorted((load(path) for path in paths), key=lambda record: record.date)
    by_device = {
        record.device: record
        for record in found
        if record.complete and any(name.startswith(prefix) for name in record.by_name)
    }
    return [by_device[device] for device in sorted(by_device)]
