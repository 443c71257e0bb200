"""Runs every check on releases with a known bug, without it, and on the newest.

    python -m field.run [--cache FOLDER]

Releases are installed from the package index, each into a folder of its own in the cache, and not
into python's own folders. Writes results/field.json and the table of docs/FIELD.md. Exit status 1
when a check that a case names passes in the release with the bug, or when a check fails in the one
without it that `cases.toml` does not list.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.toml import tomllib

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "field" / "cases.toml"
RECORD = ROOT / "results" / "field.json"
FOLDERS = {"liger-kernel": "liger", "fla-core": "fla"}  # library -> adapters, and their provider
MODULES = {"liger-kernel": "liger_kernel", "fla-core": "fla"}
NEEDED = {"fla-core": ("einops==0.8.2",)}  # beside torch and triton, which are there
BAD = ("failed", "crashed")

Findings = dict[str, str]  # check -> what was seen, of those that fail


@dataclass(frozen=True)
class Case:
    """A bug: the release that has it, and the one that does not (None: there is none yet)."""

    library: str
    issue: int
    op: str
    buggy: str
    found_by: tuple[str, ...]
    bug: str
    fixed: str | None = None


@dataclass(frozen=True)
class Known:
    """A check that fails besides the bugs, and whose fault that is: library or harness."""

    check: str
    whose: str
    ops: tuple[str, ...]
    why: str


def declared() -> tuple[list[Case], list[Known], dict[str, str]]:
    """The bugs, the other known failures, and the newest release by library."""
    data = tomllib.loads(CASES.read_text(encoding="utf-8"))
    cases = [Case(**{**one, "found_by": tuple(one["found_by"])}) for one in data["case"]]
    known = [Known(**{**one, "ops": tuple(one["ops"])}) for one in data["known"]]
    return cases, known, data["newest"]


def installed(library: str, release: str, cache: Path) -> Path:
    """The folder of a release, installed there if it is not."""
    folder = cache / f"{library}-{release}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as part:
            target = Path(part) / "release"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            packages = [f"{library}=={release}", *NEEDED.get(library, ())]
            subprocess.run([*pip, "--target", target, *packages], check=True)
            # Early releases are namespace packages: a release in python's own folders would win.
            (target / MODULES[library] / "__init__.py").touch()
            target.rename(folder)
    return folder


def findings(library: str, op: str, folder: Path) -> Findings:
    """What fails when every check is run on a release's kernel."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        path = os.pathsep.join([str(folder), str(ROOT)])
        adapter = f"field/{FOLDERS[library]}/{op}.py"
        command = ["-m", "tinyllama", "check", adapter, "--device", "cpu", "--json", str(out)]
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        if not out.exists():
            raise RuntimeError(f"{adapter} on {folder.name}: {done.stdout}{done.stderr}")
        found = json.loads(out.read_text(encoding="utf-8"))
    if wrong := _failing(found.get(f"{op}-eager", [])):
        raise RuntimeError(f"the reference of {op} fails {', '.join(wrong)}: fix {adapter}")
    return _failing(found[f"{op}-{FOLDERS[library]}"])


def _failing(checks: list[dict[str, str]]) -> Findings:
    return {
        one["check"]: f"{one['case']}: {one['message']}" for one in checks if one["outcome"] in BAD
    }


def verdicts(case: Case, found: Mapping[str, Findings], known: list[Known]) -> list[str]:
    """How a case differs from its declaration. found: by release."""
    wrong = [
        f"{case.op} {case.buggy}: {check} does not find the bug"
        for check in case.found_by
        if check not in found[case.buggy]
    ]
    excused = {one.check for one in known if case.op in one.ops} - set(case.found_by)
    if case.fixed is not None:
        unknown = found[case.fixed].keys() - excused
        wrong += [f"{case.op} {case.fixed}: {check} fails" for check in sorted(unknown)]
    return wrong


def table() -> str:
    """The Markdown of the record: versions, and a row for each case."""
    record = recorded()
    made = ", ".join(f"{name} {what}" for name, what in record["made_with"].items())
    lines = [
        f"{record['date']}, {made}.",
        "",
        "| issue | op | bug | release with it: what fails | without it | newest |",
        "|---|---|---|---|---|---|",
    ]
    for one in record["cases"]:
        cells = [f"{one['library']} {one['issue']}", one["op"], one["bug"]]
        for release in (one["buggy"], one["fixed"], one["newest"]):
            failing = ", ".join(one["found"].get(release, ())) or "nothing"
            cells.append(f"{release}: {failing}" if release else "none")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m field.run", description=__doc__)
    default = Path.home() / ".cache" / "tinyllama-field"
    parser.add_argument("--cache", type=Path, default=default, help="of releases")
    parser.add_argument("--ops", default="", help="A,B: only these; other rows stay as they are")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    cases, known, newest = declared()
    rows = {row["op"]: row for row in recorded()["cases"]} if args.ops else {}
    wrong = []
    for case in cases:
        if args.ops and case.op not in args.ops.split(","):
            continue
        found: dict[str, Findings] = {}
        for release in dict.fromkeys([case.buggy, case.fixed, newest[case.library]]):
            if release is not None:
                folder = installed(case.library, release, args.cache)
                found[release] = findings(case.library, case.op, folder)
                failing = ", ".join(found[release]) or "nothing fails"
                print(f"{case.op} {release}: {failing}", flush=True)
        wrong += verdicts(case, found, known)
        rows[case.op] = {**vars(case), "newest": newest[case.library], "found": found}
        write([rows[one.op] for one in cases if one.op in rows])
    subprocess.run([sys.executable, "-m", "tools.generate_docs"], cwd=ROOT, check=True)
    for line in wrong:
        print(f"not as declared: {line}")
    return 1 if wrong else 0


def recorded() -> dict[str, Any]:
    """The record of the last run."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def write(rows: list[dict[str, Any]]) -> None:
    """Write the record of these rows."""
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "triton")}
    record = {"date": date.today().isoformat(), "made_with": versions, "cases": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
