"""Runs every check on kernels of other projects: releases with a known bug, without it, the newest.

    python -m field.run [--jobs N] [--ops A,B]

Releases are installed from the package index, each into a folder of its own in a cache. Writes
results/field.json and the tables of docs/FIELD.md. Exit status 1 when a check that a case names
passes in the release with the bug, or when a check finds a wrong or unsafe result that `cases.toml`
does not list, in the release without it or in the newest; or when a check was not tried although no
fault of the release says why.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from tinyllama.harness.machine.parsed import tomllib
from tinyllama.harness.report.tables import markdown_table

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "field" / "cases.toml"
RECORD = ROOT / "results" / "field.json"
CACHE = Path.home() / ".cache" / "tinyllama-field"  # of releases
# library -> its module; the folder of its adapters, which is the name of their provider
MODULES = {
    "liger-kernel": ("liger_kernel", "liger"),
    "fla-core": ("fla", "fla"),
    "unsloth": ("unsloth", "unsloth"),
    "flag-gems": ("flag_gems", "flag_gems"),
}
NEEDED = {"fla-core": ("einops==0.8.2",)}  # beside torch and triton, which are there

Faults = dict[str, str]  # check -> what it says, of the checks that find a wrong or unsafe result


@dataclass(frozen=True)
class Case:
    """A bug: the release that has it, and the one that does not (None: there is none yet).

    issue: its public number; None: the checks found it. found_by: checks that find the bug. known:
    checks that may find more, in any release.
    """

    library: str
    op: str
    buggy: str
    found_by: tuple[str, ...]
    bug: str
    newest: str
    issue: int | None = None
    fixed: str | None = None
    known: tuple[str, ...] = ()

    @property
    def releases(self) -> list[str]:
        return [*dict.fromkeys(filter(None, (self.buggy, self.fixed, self.newest)))]

    def surprises(self, faults: Mapping[str, Faults]) -> list[str]:
        """How the faults of each release differ from what is declared."""
        excused = {*self.known} - {*self.found_by}
        if self.fixed is None:
            excused |= {*self.found_by}
        missed = [
            f"{self.op} {self.buggy}: {check} does not find the bug"
            for check in self.found_by
            if check not in faults[self.buggy]
        ]
        without = dict.fromkeys(filter(None, (self.fixed, self.newest)))
        return missed + [
            f"{self.op} {release}: {check} fails"
            for release in without
            for check in sorted(faults[release].keys() - excused)
        ]


def declared() -> list[Case]:
    """The bugs of `cases.toml`."""
    data = tomllib.loads(CASES.read_text(encoding="utf-8"))
    cases = []
    for row in data["case"]:
        known = [fault["check"] for fault in data["known"] if row["op"] in fault["ops"]]
        row = {**row, "newest": data["newest"][row["library"]], "known": known}
        cases.append(msgspec.convert(row, Case))
    return cases


def installed(library: str, release: str) -> Path:
    """The folder of a release; it is installed there if it is not there yet."""
    folder = CACHE / f"{library}-{release}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as part:
            target = Path(part) / "release"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            packages = [f"{library}=={release}", *NEEDED.get(library, ())]
            subprocess.run([*pip, "--target", target, *packages], check=True)
            # Early releases are namespace packages: a release in python's own folders would win.
            (target / MODULES[library][0] / "__init__.py").touch()
            target.rename(folder)
    return folder


def checked(library: str, op: str, folder: Path, *, reference: bool = False) -> Faults:
    """What every check finds in a release's kernel. reference: the op's reference is checked, too.

    Raises RuntimeError where the reference fails a check, where no fault says why a check was not
    tried, or where none could be: that would look as if nothing were wrong.
    """
    provider = MODULES[library][1]
    adapter = f"field/{provider}/{op}.py"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "findings.json"
        words = ["check", adapter, "--device", "cpu", "--json", str(out)]
        words += [] if reference else ["--provider", provider]
        path = os.pathsep.join([str(folder), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-m", "tinyllama", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # in one order
            capture_output=True,
            text=True,
        )
        if not out.exists():
            raise RuntimeError(f"{adapter} on {folder.name}: {done.stderr}")
        findings = json.loads(out.read_text(encoding="utf-8"))
    by_provider = {name.rpartition("-")[2]: checks for name, checks in findings.items()}
    if wrong := _faults(by_provider.get("eager", ())):
        raise RuntimeError(f"the reference of {op} fails {', '.join(wrong)}: fix {adapter}")
    checks = by_provider[provider]
    faults = _faults(checks)
    unknown = [check for check in checks if check["outcome"] == "blocked" and not faults]
    if all(check["outcome"] == "unsupported" for check in checks):
        unknown = checks
    if unknown:
        names = ", ".join(check["check"] for check in unknown)
        raise RuntimeError(f"nothing is known of {names}: {unknown[0]['message']}")
    return {check: text.replace(f"{folder}/", "") for check, text in faults.items()}


def _faults(checks: Any) -> Faults:
    """The checks that find a wrong or unsafe result; findings of other ranks are no bugs."""
    return {
        check["check"]: f"{check['case']}: {check['message']}"
        for check in checks
        if check["outcome"] in ("failed", "crashed") and check["rank"] in ("wrong result", "unsafe")
    }


def tables() -> str:
    """The Markdown of the record: versions, and a row for each bug."""
    record = recorded()
    versions = ", ".join(f"{name} {number}" for name, number in record["made_with"].items())
    rows = [["issue", "op", "bug", "release with it: what fails", "without it", "newest"]]
    for case in record["cases"]:
        rows.append([f"{case['library']} {case['issue'] or ''}", case["op"], case["bug"]])
        for release in (case["buggy"], case["fixed"], case["newest"]):
            failing = ", ".join(case["found"].get(release, ())) or "nothing"
            rows[-1].append(f"{release}: {failing}" if release else "none")
    return f"{record['date']}, {versions}.\n\n{markdown_table(rows)}"


def recorded() -> dict[str, Any]:
    """The record of the last run."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def row_of(case: Case) -> tuple[dict[str, Any] | None, list[str]]:
    """The row of a case in the record, None where something could not be checked; and what is not
    as declared."""
    faults = {}
    for place, release in enumerate(case.releases):
        try:
            folder = installed(case.library, release)
            faults[release] = checked(case.library, case.op, folder, reference=not place)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            return None, [f"{case.library} {case.op} {release}: {error}"]
        failing = ", ".join(faults[release]) or "nothing fails"
        print(f"{case.library} {case.op} {release}: {failing}", flush=True)
    return {**asdict(case), "found": faults}, case.surprises(faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m field.run", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="so many releases at a time (1)")
    parser.add_argument("--ops", default="", help="A,B: only these; other rows stay as they are")
    args = parser.parse_args()
    cases = declared()
    ops = args.ops.split(",") if args.ops else [case.op for case in cases]
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        results = list(pool.map(row_of, (case for case in cases if case.op in ops)))
    by_op = {row["op"]: row for row in recorded()["cases"] if args.ops}
    by_op |= {row["op"]: row for row, _ in results if row}
    versions = {name: version(name) for name in ("torch", "triton")}
    record = {
        "date": date.today().isoformat(),
        "made_with": {"python": platform.python_version(), **versions},
        "cases": [by_op[case.op] for case in cases if case.op in by_op],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tools.generate_docs"], cwd=ROOT, check=True)
    wrong = [line for _, lines in results for line in lines]
    print("\n".join(f"not as declared: {line}" for line in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
