"""Gates branches whose verdicts are known, and checks the verdicts.

    python -m tools.try_gate [--only slower-kernel]

Each branch changes a few lines of this tree, in a copy with a history of its own, and is gated
against the unchanged tree. Exit status: 0 every branch got its verdict in its time, 1 one did not,
2 no GPU, or an edit that no longer fits this tree.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import check_known
from tinyllama.harness.machine.device import cannot, default_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.parsed import tomllib

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1200.0  # of one gate at most
BASE = "tried-base"  # the branch of the tree as it is
DECLARED = ROOT / "tools/try_gate.toml"


@dataclass(frozen=True)
class Edit:
    """The only, or ``first``, place in a file where ``old`` stands becomes ``new``."""

    file: str
    old: str
    new: str
    first: bool = False

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        times = text.count(self.old)
        if times == 0 or (times > 1 and not self.first):
            raise ValueError(f"{self.file} has {self.old!r:.80} {times} times: fix the edit")
        path.write_text(text.replace(self.old, self.new, 1), encoding="utf-8")


@dataclass(frozen=True)
class Branch:
    """A branch of `tools/try_gate.toml`, which says what the fields mean."""

    does: str
    edits: tuple[Edit, ...]
    outcomes: list[str]
    seconds: float
    slower: list[str] | None = None

    def wrong(self, run: Mapping[str, Any]) -> list[str]:
        """What of a run is not as it should be."""
        faults = []
        if unknown := set(run["outcomes"]) - set(self.outcomes):
            faults.append(f"some are {', '.join(sorted(unknown))}")
        if run["seconds"] > self.seconds:
            faults.append(f"it took {run['seconds']:.0f} s, not {self.seconds:.0f}")
        if (run["status"] == 0) != (self.slower is None):
            faults.append(f"status {run['status']}")
        if self.slower is not None and not any(map(self._named, run["slower"])):
            benchmark, metric, kernel = self.slower
            faults.append(" ".join(filter(None, (metric, "of", benchmark, "is not named", kernel))))
        return faults

    def _named(self, benchmark: Mapping[str, Any]) -> bool:
        assert self.slower is not None
        pattern, metric, kernel = self.slower
        named = not kernel or any(line.startswith(kernel) for line in benchmark["moved"])
        return (
            fnmatchcase(benchmark["benchmark"], pattern)
            and metric in benchmark["metrics"]
            and named
        )


BRANCHES = {
    name: Branch(**{**fields, "edits": tuple(Edit(**edit) for edit in fields["edits"])})
    for name, fields in tomllib.loads(DECLARED.read_text(encoding="utf-8")).items()
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default=",".join(BRANCHES), metavar="BRANCH,BRANCH")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    check_known("--only", names, BRANCHES)
    if reason := cannot("gpu", default_device()):
        raise UsageError(reason)
    results = args.results_dir.resolve()
    with tempfile.TemporaryDirectory(prefix="tried-") as folder:
        copy = Path(folder) / "tree"
        copied(ROOT, copy)
        runs = []
        for name in names:
            branched(copy, name)
            runs.append(gated(copy, name, results))
            print(line(runs[-1]), flush=True)
    return int(any(BRANCHES[run["branch"]].wrong(run) for run in runs))


def line(run: Mapping[str, Any]) -> str:
    """A run in one line."""
    counted = ", ".join(f"{number} {title}" for title, number in run["outcomes"].items())
    faults = BRANCHES[run["branch"]].wrong(run)
    said = f"; WRONG: {'; '.join(faults)}" if faults else ""
    return f"{run['branch']}: status {run['status']} in {run['seconds']:.0f} s: {counted}{said}"


# -- a copy with branches ------------------------------------------------------------------------


def copied(root: Path, copy: Path) -> None:
    """Copy the files of a tree that git does not ignore, and commit them on the branch `BASE`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)
    _git(copy, "init", "--quiet", "--initial-branch", BASE)
    _commit(copy, "the tree as it is")


def _commit(copy: Path, message: str) -> None:
    """Commit all that was changed."""
    _git(copy, "add", "--all")
    who = ("-c", "user.name=copy", "-c", "user.email=copy@localhost")
    _git(copy, *who, "commit", "--quiet", "--message", message)


def _git(copy: Path, *args: str) -> None:
    subprocess.run(["git", *args], cwd=copy, check=True)


def branched(copy: Path, name: str) -> None:
    """Check out a branch with its edits. Raises ValueError where one does not fit."""
    _git(copy, "checkout", "--quiet", "-B", name, BASE)
    for edit in BRANCHES[name].edits:
        edit.apply(copy)
    _commit(copy, BRANCHES[name].does)


# -- what the gate says --------------------------------------------------------------------------


def gated(copy: Path, name: str, results: Path) -> dict[str, Any]:
    """One comparison of the branch that is checked out with the tree as it is."""
    report = copy.with_name("report.json")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tinyllama", "gate", "--against", BASE]
    command += ["--gate-json", str(report), "--results-dir", str(results)]
    command += ["--time-limit", f"{SECONDS:g}"]
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path}
    env.pop("TINYLLAMA_COMMIT", None)  # of this tree, not of the copy's
    began = time.monotonic()
    done = subprocess.run(command, cwd=copy, env=env, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    if not report.is_file():
        raise ValueError(f"{name}: the gate ended with {done.returncode} and wrote no report")
    data = json.loads(report.read_text())
    return {
        "branch": name,
        "status": done.returncode,
        "seconds": round(seconds, 1),
        "outcomes": dict(Counter(verdict["outcome"] for verdict in data["verdicts"])),
        "slower": slower(data),
    }


def slower(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each benchmark that is SLOWER the metrics that are, and the kernels named."""
    return [
        {
            "benchmark": name,
            "metrics": [f["metric"] for f in benchmark["figures"] if f["outcome"] == "SLOWER"],
            "moved": benchmark["moved"],
        }
        for comparison in data["comparisons"]
        for name, benchmark in comparison["benchmarks"].items()
        if benchmark["outcome"] == "SLOWER"
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(f"try_gate: {error} This needs a git checkout.", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"try_gate: {error}", file=sys.stderr)
    sys.exit(2)
