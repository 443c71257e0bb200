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
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.toml import tomllib

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "field" / "cases.toml"
RECORD = ROOT / "results" / "field.json"
CACHE = Path.home() / ".cache" / "tinyllama-field"  # of releases
# library -> the folder of its adapters, which is the name of their provider
FOLDERS = {
    "liger-kernel": "liger",
    "fla-core": "fla",
    "unsloth": "unsloth",
    "flag-gems": "flag_gems",
    "tutorials": "tutorials",
    "attorch": "attorch",
}
MODULES = {
    "liger-kernel": "liger_kernel",
    "fla-core": "fla",
    "unsloth": "unsloth",
    "flag-gems": "flag_gems",
}  # of those in the index; the others are written anew
NEEDED = {"fla-core": ("einops==0.8.2",)}  # beside torch and triton, which are there
BAD = ("failed", "crashed")
RANKS = ("wrong result", "unsafe")  # of faults; the others are no bugs
HERE = "written here"  # the release of a kernel that is in no index

Faults = dict[str, str]  # check -> what was seen, of those that find a wrong or unsafe result


@dataclass(frozen=True)
class Found:
    """What every check says of one release. first: seconds to the first verdict; of the harness,
    so in no comparison of two runs."""

    faults: Faults
    first: float = field(default=0.0, compare=False)


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
class Kernel:
    """Another kernel of the set, and exactly the checks that find a wrong or unsafe result."""

    library: str
    op: str
    release: str
    fails: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Known:
    """A check that finds more than the bug, and whose fault that is: library or harness."""

    check: str
    whose: str
    ops: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Declared:
    cases: list[Case]
    kernels: list[Kernel]
    known: list[Known]
    newest: dict[str, str]


def declared() -> Declared:
    """The bugs, the other kernels, the other known faults, and the newest release by library."""
    data = tomllib.loads(CASES.read_text(encoding="utf-8"))
    cases = [Case(**{**one, "found_by": tuple(one["found_by"])}) for one in data["case"]]
    kernels = [Kernel(**{**one, "fails": tuple(one["fails"])}) for one in data["kernel"]]
    known = [Known(**{**one, "ops": tuple(one["ops"])}) for one in data["known"]]
    return Declared(cases, kernels, known, data["newest"])


def installed(library: str, release: str, cache: Path) -> Path:
    """The folder of a release, installed there if it is not; of what is written here, the root."""
    if release == HERE:
        return ROOT
    folder = cache / f"{library}-{release}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
            target = Path(part) / "release"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            packages = [f"{library}=={release}", *NEEDED.get(library, ())]
            subprocess.run([*pip, "--target", target, *packages], check=True)
            # Early releases are namespace packages: a release in python's own folders would win.
            (target / MODULES[library] / "__init__.py").touch()
            target.rename(folder)
    return folder


def findings(library: str, op: str, folder: Path, *, reference: bool = False) -> Found:
    """What every check finds in a release's kernel. reference: also of the op's reference, which
    must hold every check."""
    provider = FOLDERS[library]
    adapter = f"field/{provider}/{op}.py"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        command = ["-m", "tinyllama", "check", adapter, "--device", "cpu", "--json", str(out)]
        command += [] if reference else ["--provider", provider]
        path = os.pathsep.join(dict.fromkeys([str(folder), str(ROOT)]))
        started, first, said = time.monotonic(), 0.0, []
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # in one order
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            for line in process.stderr or ():
                said.append(line)
                if not first and ": trying " not in line:
                    first = time.monotonic() - started
        if not out.exists():
            raise RuntimeError(f"{adapter} on {folder.name}: {''.join(said)}")
        found = json.loads(out.read_text(encoding="utf-8"))
    for name, checks in found.items():
        if name.endswith("-eager") and (wrong := _faults(checks, folder)):
            raise RuntimeError(f"the reference of {op} fails {', '.join(wrong)}: fix {adapter}")
    (checks,) = (one for name, one in found.items() if name.endswith(f"-{provider}"))
    return Found(_faults(checks, folder), first)


def _faults(checks: list[dict[str, str]], folder: Path) -> Faults:
    """Raises RuntimeError where no fault says why a check was not tried, or where none could be:
    that would look as if nothing were wrong."""
    faults = {
        one["check"]: f"{one['case']}: {one['message']}".replace(f"{folder}/", "")
        for one in checks
        if one["outcome"] in BAD and one["rank"] in RANKS and not one["cause"]
    }
    unknown = [
        one
        for one in checks
        if one["outcome"] == "blocked" and (one["traceback"] or not faults)  # an error ended it
    ]
    if all(one["outcome"] == "unsupported" for one in checks):
        unknown = checks
    if unknown:
        names = ", ".join(one["check"] for one in unknown)
        raise RuntimeError(f"nothing is known of {names}: {unknown[0]['message']}")
    return faults


def verdicts(
    case: Case, found: Mapping[str, Faults], known: list[Known], newest: str | None = None
) -> list[str]:
    """How a case differs from its declaration. found: by release; newest: the release of which no
    other faults are known than these."""
    wrong = [
        f"{case.op} {case.buggy}: {check} does not find the bug"
        for check in case.found_by
        if check not in found[case.buggy]
    ]
    excused = {one.check for one in known if case.op in one.ops} - set(case.found_by)
    if case.fixed is None:
        excused |= set(case.found_by)
    for release in filter(None, dict.fromkeys([case.fixed, newest])):
        unknown = found[release].keys() - excused
        wrong += [f"{case.op} {release}: {check} fails" for check in sorted(unknown)]
    return wrong


def differences(kernel: Kernel, faults: Faults) -> list[str]:
    """How the faults of another kernel differ from those that are declared."""
    named = f"{kernel.op} {kernel.release}"
    missed = sorted(set(kernel.fails) - set(faults))
    alarms = sorted(set(faults) - set(kernel.fails))
    return [
        *(f"{named}: {check} does not find what is known" for check in missed),
        *(f"{named}: {check} fails" for check in alarms),
    ]


def tables() -> str:
    """The Markdown of the record: versions, a row for each bug, and one for each other kernel."""
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
    lines += ["", "| other kernel | op | what fails | known |", "|---|---|---|---|"]
    for one in record["kernels"]:
        release = f"{one['library']} {one['release']}"
        failing = ", ".join(one["found"]) or "nothing"
        lines.append(f"| {release} | {one['op']} | {failing} | {one['why']} |")
    return "\n".join(lines)


def recorded() -> dict[str, Any]:
    """The record of the last run."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def write(cases: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> None:
    """Write the record of these rows."""
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "triton")}
    record = {"date": date.today().isoformat(), "made_with": versions}
    text = json.dumps({**record, "cases": cases, "kernels": kernels}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def asked(every: Declared) -> Iterator[tuple[str, str, str, bool]]:
    """Library, op, release, and whether it is the first of its op: its reference is checked too."""
    for case in every.cases:
        releases = dict.fromkeys([case.buggy, case.fixed, every.newest[case.library]])
        for place, release in enumerate(filter(None, releases)):
            yield case.library, case.op, release, not place
    for kernel in every.kernels:
        yield kernel.library, kernel.op, kernel.release, True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m field.run", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="of releases")
    parser.add_argument("--jobs", type=int, default=1, help="so many releases at a time (1)")
    parser.add_argument("--ops", default="", help="A,B: only these; other rows stay as they are")
    args = parser.parse_args()
    every = declared()
    chosen = args.ops.split(",") if args.ops else [op for _, op, _, _ in asked(every)]
    folders = {
        (library, op, release): (installed(library, release, args.cache), first)
        for library, op, release, first in asked(every)
        if op in chosen
    }

    wrong = []

    def tried(one: tuple[str, str, str]) -> Found | None:
        folder, first = folders[one]
        try:
            found = findings(*one[:2], folder, reference=first)
        except RuntimeError as error:
            wrong.append(f"{' '.join(one)}: {error}")
            return None
        failing = ", ".join(found.faults) or "nothing fails"
        print(f"{' '.join(one)}: {failing} (first verdict in {found.first:.0f} s)", flush=True)
        return found

    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        every_one = zip(folders, pool.map(tried, folders), strict=True)
        found = {one: seen for one, seen in every_one if seen is not None}
    before = recorded() if args.ops else {"cases": [], "kernels": []}
    cases = {(row["library"], row["op"]): row for row in before["cases"]}
    kernels = {(row["library"], row["op"]): row for row in before["kernels"]}
    for case in every.cases:
        mine = {r: one.faults for (*of, r), one in found.items() if of == [case.library, case.op]}
        newest = every.newest[case.library]
        if {case.buggy, case.fixed, newest} - {None} <= set(mine):
            wrong += verdicts(case, mine, every.known, newest)
            row = {**asdict(case), "newest": newest, "found": mine}
            cases[case.library, case.op] = row
    for kernel in every.kernels:
        if (seen := found.get((kernel.library, kernel.op, kernel.release))) is not None:
            wrong += differences(kernel, seen.faults)
            kernels[kernel.library, kernel.op] = {**asdict(kernel), "found": seen.faults}
    write(
        [cases[key] for one in every.cases if (key := (one.library, one.op)) in cases],
        [kernels[key] for one in every.kernels if (key := (one.library, one.op)) in kernels],
    )
    subprocess.run([sys.executable, "-m", "tools.generate_docs"], cwd=ROOT, check=True)
    for line in wrong:
        print(f"not as declared: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
