"""Runs every check on releases with a known bug, without it, and on the newest.

    python -m field.run [--cache FOLDER]

Releases are installed from the package index, each into a folder of its own in the cache; nothing
is installed where python looks by itself. Writes results/field.json and the table of docs/FIELD.md.
Exit status 1 when a check that a case names holds in the release with the bug, or anything but
what `cases.toml` knows of fails in the one without.
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "field" / "cases.toml"
RECORD = ROOT / "results" / "field.json"
PAGE = ROOT / "docs" / "FIELD.md"
MARKS = ("<!-- table -->\n", "<!-- end of the table -->")
FOLDERS = {"liger-kernel": "liger", "fla-core": "fla"}  # library -> adapters, and their provider
MODULES = {"liger-kernel": "liger_kernel", "fla-core": "fla"}
NEEDED = {"fla-core": ("einops==0.8.2",)}  # beside torch and triton, which are there
BAD = ("failed", "crashed")

Findings = dict[str, str]  # check -> what was seen, of those that fail


@dataclass(frozen=True)
class Case:
    """A bug: the release that has it, the one that does not (None: there is none yet)."""

    library: str
    issue: int
    op: str
    buggy: str
    found_by: tuple[str, ...]
    bug: str
    fixed: str | None = None


@dataclass(frozen=True)
class Known:
    """What fails beside the bugs, and whether the library or the harness is wrong there."""

    check: str
    whose: str
    ops: tuple[str, ...]
    why: str


def declared() -> tuple[list[Case], list[Known], dict[str, str]]:
    """The bugs, what else is known to fail, and the newest release by library."""
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
            # Early releases are namespace packages: one installed beside python would go first.
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
        raise RuntimeError(f"the reference of {op} fails {', '.join(wrong)}: mend {adapter}")
    return _failing(found[f"{op}-{FOLDERS[library]}"])


def _failing(checks: list[dict[str, str]]) -> Findings:
    return {
        one["check"]: f"{one['case']}: {one['message']}" for one in checks if one["outcome"] in BAD
    }


def verdicts(case: Case, found: Mapping[str, Findings], known: list[Known]) -> list[str]:
    """What is not as declared for a case. found: by release."""
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


def table(record: Mapping[str, Any]) -> str:
    """The Markdown of a record: versions, and a row for each case."""
    made = ", ".join(f"{name} {what}" for name, what in record["made_with"].items())
    lines = [
        f"{record['date']}, {made}.",
        "",
        "| issue | op | bug | release with it: what fails | without it | newest |",
        "|---|---|---|---|---|---|",
    ]
    for one in record["cases"]:

        def cell(role: str, one: Mapping[str, Any] = one) -> str:
            if one[role] is None:
                return "none"
            failing = one["found"][one[role]]
            return f"{one[role]}: {', '.join(failing) or 'nothing'}"

        cells = [f"{one['library']} {one['issue']}", one["op"], one["bug"]]
        lines.append(f"| {' | '.join([*cells, *map(cell, ('buggy', 'fixed', 'newest'))])} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, made: str) -> str:
    """A page with its generated part replaced."""
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return before + MARKS[0] + made + MARKS[1] + after


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m field.run", description=__doc__)
    default = Path.home() / ".cache" / "tinyllama-field"
    parser.add_argument("--cache", type=Path, default=default, help="of releases")
    parser.add_argument("--ops", default="", help="A,B: only these; other rows stay as recorded")
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
    for line in wrong:
        print(f"not as declared: {line}")
    return 1 if wrong else 0


def recorded() -> dict[str, Any]:
    """What the last run wrote."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def write(rows: list[dict[str, Any]]) -> None:
    """The record of these rows, and the page's table of it."""
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "triton")}
    record = {"date": date.today().isoformat(), "made_with": versions, "cases": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table(record)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
