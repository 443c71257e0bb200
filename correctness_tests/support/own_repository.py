"""A file of ops, as a repository of one's own has it, git there, and the command `gate`."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import ENVIRONMENT, ROOT

OP = """
import torch

from tinyllama.harness import Case, Op, Tensor

{name} = Op(
    "{name}",
    inputs={{"x": Tensor("N D", grad=True)}},
    outputs={{"y": "N D"}},
    cases=[Case(N=3, D=8)],
    timed=[Case(N=16, D=8)],
    bytes={{"forward": lambda size, N, D: 2 * N * D * size,
           "backward": lambda size, N, D: 2 * N * D * size}},
    flops={{"forward": lambda N, D: N * D, "backward": lambda N, D: N * D}},
)


@{name}.reference
def eager(x):
    return 2.0 * x


@{name}.provider("sum")
def added(x):
    return {body}
"""


def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """git as it is where nobody set anything but an author."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


def git(*args: str) -> str:
    run = subprocess.run(["git", *args], capture_output=True, check=True, text=True)
    return run.stdout.strip()


def first_commit() -> None:
    """Make the current folder a repository, with all its files on the branch ``main``."""
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message=all")


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write texts, without the margin that they share, to files by their paths in a folder."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


def committed(root: Path, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder from now on: a repository of what is there and these files."""
    write_files(root, files)
    monkeypatch.chdir(root)
    plain_git(monkeypatch)
    first_commit()
    return root


# A machine that nobody else uses, whoever does: the load of one that runs tests is no reason.
QUIET = "import os\nos.getloadavg = lambda: (0.0, 0.0, 0.0)\n"


@dataclass(frozen=True)
class Gated:
    """What a command left: its status, what it printed, and the gate's report."""

    status: int
    out: str
    report: dict[str, Any]

    @property
    def verdicts(self) -> dict[str, dict[str, str]]:
        return {verdict["name"]: verdict for verdict in self.report.get("verdicts", [])}

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: verdict["outcome"] for name, verdict in self.verdicts.items()}


@dataclass(frozen=True)
class Checkout:
    """A checkout in which commands are started."""

    root: Path

    def run(self, *command: str) -> Gated:
        """What a module does that is started on a quiet machine."""
        quiet = self.root.with_name("quiet")
        quiet.mkdir(exist_ok=True)
        (quiet / "sitecustomize.py").write_text(QUIET)
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(quiet), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=300,
        )
        file = self.root / "build/gate.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        return Gated(done.returncode, done.stdout + done.stderr, report)

    def gate(self, *options: str) -> Gated:
        """What the gate says of this tree against its branch ``main``."""
        (self.root / "build").mkdir(exist_ok=True)
        (self.root / "build/gate.json").unlink(missing_ok=True)
        report = ("--gate-json", "build/gate.json", "--device", "cpu")
        return self.run("tinyllama", "gate", "--against", "main", *report, *options)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
