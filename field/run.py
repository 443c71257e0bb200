"""Runs every check on kernels of other projects: releases with a known bug, without it, the newest.

    python -m field.run [--cache FOLDER] [--jobs N] [--ops A,B]

Releases are installed from the package index, each into a folder of its own in the cache, and not
into python's own folders. Writes results/field.json and the tables of docs/FIELD.md. Exit status 1
when a check that a case names passes in the release with the bug, or when a check finds a wrong or
unsafe result that `cases.toml` does not list, in the release without it, in the newest or in
another kernel; or when a check was not tried although no fault of the release says why.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.parsed import tomllib

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

    found_by: checks that find the bug. known: checks that may find more, in any release.
    """

    library: str
    issue: int
    op: str
    buggy: str
    found_by: tuple[str, ...]
    bug: str
    newest: str
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


@dataclass(frozen=True)
class Kernel:
    """Another kernel of a release, and exactly the checks that find a wrong or unsafe result."""

    library: str
    op: str
    release: str
    fails: tuple[str, ...]
    why: str

    @property
    def releases(self) -> list[str]:
        return [self.release]

    def surprises(self, faults: Mapping[str, Faults]) -> list[str]:
        """How the faults differ from what is declared."""
        checks, fails = {*faults[self.release]}, {*self.fails}
        named = f"{self.op} {self.release}"
        missed = [f"{named}: {check} does not find what is known" for check in fails - checks]
        return sorted(missed + [f"{named}: {check} fails" for check in checks - fails])


def declared() -> tuple[list[Case], list[Kernel]]:
    """The bugs and the other kernels of `cases.toml`."""
    data = tomllib.loads(CASES.read_text(encoding="utf-8"))
    newest, known = data["newest"], data["known"]

    def case(row: dict[str, Any]) -> Case:
        checks = tuple(fault["check"] for fault in known if row["op"] in fault["ops"])
        row = {**row, "found_by": tuple(row["found_by"]), "newest": newest[row["library"]]}
        return Case(**row, known=checks)

    kernels = [Kernel(**{**row, "fails": tuple(row["fails"])}) for row in data["kernel"]]
    return [case(row) for row in data["case"]], kernels


def installed(library: str, release: str, cache: Path) -> Path:
    """The folder of a release; it is installed there if it is not there yet."""
    folder = cache / f"{library}-{release}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
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
    untried = [check for check in checks if check["outcome"] == "blocked"]
    unknown = [check for check in untried if check["traceback"] or not faults]
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
    """The Markdown of the record: versions, a row for each bug, and one for each other kernel."""
    record = recorded()
    versions = ", ".join(f"{name} {number}" for name, number in record["made_with"].items())
    lines = [
        f"{record['date']}, {versions}.",
        "",
        "| issue | op | bug | release with it: what fails | without it | newest |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["cases"]:
        cells = [f"{row['library']} {row['issue']}", row["op"], row["bug"]]
        for release in (row["buggy"], row["fixed"], row["newest"]):
            failing = ", ".join(row["found"].get(release, ())) or "nothing"
            cells.append(f"{release}: {failing}" if release else "none")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| other kernel | op | what fails | known |", "|---|---|---|---|"]
    for row in record["kernels"]:
        failing = ", ".join(row["found"][row["release"]]) or "nothing"
        release = f"{row['library']} {row['release']}"
        lines.append(f"| {release} | {row['op']} | {failing} | {row['why']} |")
    return "\n".join(lines)


def recorded() -> dict[str, Any]:
    """The record of the last run."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m field.run", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="of releases")
    parser.add_argument("--jobs", type=int, default=1, help="so many releases at a time (1)")
    parser.add_argument("--ops", default="", help="A,B: only these; other rows stay as they are")
    args = parser.parse_args()
    cases, kernels = declared()
    declared_ops = [*(case.op for case in cases), *(kernel.op for kernel in kernels)]
    chosen = args.ops.split(",") if args.ops else declared_ops
    wrong: list[str] = []

    def row_of(kernel: Case | Kernel) -> dict[str, Any] | None:
        """The row of the record; None where something could not be checked."""
        faults = {}
        for place, release in enumerate(kernel.releases):
            try:
                folder = installed(kernel.library, release, args.cache)
                faults[release] = checked(kernel.library, kernel.op, folder, reference=not place)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                wrong.append(f"{kernel.library} {kernel.op} {release}: {error}")
                return None
            failing = ", ".join(faults[release]) or "nothing fails"
            print(f"{kernel.library} {kernel.op} {release}: {failing}", flush=True)
        wrong.extend(kernel.surprises(faults))
        return {**asdict(kernel), "found": faults}

    versions = {name: version(name) for name in ("torch", "triton")}
    record = {
        "date": date.today().isoformat(),
        "made_with": {"python": platform.python_version(), **versions},
    }
    before = recorded()
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        parts: dict[str, Sequence[Case | Kernel]] = {"cases": cases, "kernels": kernels}
        for part, rows in parts.items():
            by_name = {(row["library"], row["op"]): row for row in before[part] if args.ops}
            new = pool.map(row_of, (row for row in rows if row.op in chosen))
            by_name |= {(row["library"], row["op"]): row for row in filter(None, new)}
            names = [(row.library, row.op) for row in rows]
            record[part] = [by_name[name] for name in names if name in by_name]
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tools.generate_docs"], cwd=ROOT, check=True)
    for line in wrong:
        print(f"not as declared: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
