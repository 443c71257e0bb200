"""The gate as its user starts it, in a repository of ops: what each change ends in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import ENVIRONMENT, ROOT
from correctness_tests.support.own_repository import OP, git, plain_git

# A machine that nobody else uses, whoever does: the load of one that runs tests is no reason.
QUIET = "import os\nos.getloadavg = lambda: (0.0, 0.0, 0.0)\n"


@dataclass(frozen=True)
class Gated:
    """What a gate left."""

    status: int
    out: str
    report: dict[str, Any]

    @property
    def outcomes(self) -> dict[str, str]:
        return {verdict["name"]: verdict["outcome"] for verdict in self.report.get("verdicts", [])}


@dataclass(frozen=True)
class OwnRepository:
    root: Path
    quiet: Path

    def run(self, *command: str) -> Gated:
        path = os.pathsep.join([str(self.quiet), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env={**ENVIRONMENT, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        file = self.root / "build/gate.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        return Gated(done.returncode, done.stdout + done.stderr, report)

    def gate(self, *options: str) -> Gated:
        (self.root / "build/gate.json").unlink(missing_ok=True)
        report = ("--gate-json", "build/gate.json", "--device", "cpu")
        return self.run("tinyllama", "gate", "--against", "main", *report, *options)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnRepository:
    """With two ops and a test of its own; the current folder."""
    root, quiet = tmp_path / "own", tmp_path / "quiet"
    for folder in (root / "kernels", root / "tests", root / "build", quiet):
        folder.mkdir(parents=True)
    (quiet / "sitecustomize.py").write_text(QUIET)
    (root / "kernels/once.py").write_text(OP.format(name="once", body="x + x"))
    twice = OP.format(name="twice", body="x + ONE * x")
    (root / "kernels/twice.py").write_text(f"from own_helper import ONE\n{twice}")
    (root / "own_helper.py").write_text("ONE = 1.0\n")
    (root / "tests/test_once.py").write_text("def test_once():\n    pass\n")
    (root / ".gitignore").write_text("build\n")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "own"\nversion = "0.1"\ndependencies = ["torch"]\n'
        '[tool.tinyllama]\nops = ["kernels/*.py"]\n'
    )
    monkeypatch.chdir(root)
    plain_git(monkeypatch)
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message=all")
    return OwnRepository(root, quiet)


@pytest.mark.long
def test_a_comment_is_green_and_its_report_proves_it(repository: OwnRepository) -> None:
    repository.edit("kernels/once.py", "def added", "# Why.\ndef added")
    (repository.root / "tests/test_once.py").unlink()
    gated = repository.gate("--summary-markdown", "build/gate.md")
    assert gated.status == 0, gated.out
    assert set(gated.outcomes.values()) == {"IDENTICAL"}
    assert len(gated.outcomes) == 4
    assert "deleted test: tests/test_once.py" in gated.out
    assert "deleted test" in (repository.root / "build/gate.md").read_text()
    verify = ("tinyllama", "gate", "--against", "main", "--verify", "build/gate.json")
    assert repository.run(*verify).status == 0
    repository.edit("own_helper.py", "1.0", "1.5")
    assert repository.run(*verify).status == 2, "it is of another tree"


Edit = Callable[[OwnRepository], None]
ACCIDENTS: dict[str, tuple[Edit, int, str]] = {
    "a wrong result": (
        lambda repository: repository.edit("own_helper.py", "1.0", "1.01"),
        16,
        "twice-sum",
    ),
    "a renamed provider": (
        lambda repository: repository.edit("kernels/once.py", '"sum"', '"plus"'),
        15,
        "once-sum",
    ),
    "a deleted case": (
        lambda repository: repository.edit(
            "kernels/once.py", "timed=[Case(N=16", "timed=[Case(N=8"
        ),
        15,
        "once-eager",
    ),
    "a deleted op": (
        lambda repository: (repository.root / "kernels/once.py").unlink(),
        15,
        "once-sum",
    ),
    "an import that ends the process": (
        lambda repository: repository.edit(
            "kernels/once.py", "import torch", "import os; os._exit(0)"
        ),
        17,
        "ended with status 0",
    ),
    "an import that fails": (
        lambda repository: repository.edit(
            "kernels/once.py", "import torch", "import no_such_module"
        ),
        17,
        "no_such_module",
    ),
    "a bumped dependency": (
        lambda repository: repository.edit("pyproject.toml", '"torch"', '"torch>=2.8"'),
        17,
        "dependencies differ in pyproject.toml",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_honest_accident_is_not_green(repository: OwnRepository, accident: str) -> None:
    edit, status, words = ACCIDENTS[accident]
    edit(repository)
    gated = repository.gate()
    assert gated.status == status, gated.out
    assert words in gated.out
    assert str(repository.root) not in gated.out, "places are those in the repository"


@pytest.mark.long
def test_a_fix_of_a_wrong_base_is_new_by_the_bases_reference(repository: OwnRepository) -> None:
    repository.edit("own_helper.py", "1.0", "1.01")
    git("commit", "--quiet", "--all", "--message=wrong")
    repository.edit("own_helper.py", "1.01", "1.0")
    gated = repository.gate("--time-limit", "40")  # the reference beside it is timed
    assert gated.outcomes["twice-sum-N16D8-fp32/forward+backward"] == "NEW", gated.out
    assert "the base's result is wrong; the candidate's is right" in gated.out
    assert gated.status in (0, 2, 11)


@pytest.mark.long
def test_a_kernel_that_cannot_be_timed_here_is_verified(repository: OwnRepository) -> None:
    pytest.importorskip("triton")
    path = repository.root / "kernels/softmax.py"
    path.write_text((ROOT / "docs/examples/softmax.py").read_text())
    git("add", "--all")
    git("commit", "--quiet", "--message=softmax")
    repository.edit("kernels/softmax.py", "column, powers / sum", "column, 1.01 * powers / sum")
    gated = repository.gate()
    assert gated.status == 16, gated.out
    assert gated.outcomes["softmax-triton/results"] == "WRONG RESULT"
    assert "kernels/softmax.py:" in gated.out, "it names the line of the kernel"


@pytest.mark.long
def test_pytest_hands_over_before_a_conftest_imports_an_op(repository: OwnRepository) -> None:
    (repository.root / "conftest.py").write_text("import os\nos._exit(0)\n")
    repository.edit("kernels/once.py", "def added", "# Why.\ndef added")
    command = ("pytest", "-p", "tinyllama.suites.entry", "--benchmark-compare", "--against", "main")
    gated = repository.run(*command)
    assert gated.status == 0, gated.out
    assert "4 verdicts against main, all green" in gated.out
    assert "collected" not in gated.out
    for option in (["-k", "once"], ["--collect-only"], ["--deselect", "x"], ["tests::test"]):
        assert repository.run(*command, *option).status == pytest.ExitCode.USAGE_ERROR


@pytest.mark.long
def test_an_op_without_timed_cases_is_timed_on_a_larger_one_that_is_named(
    repository: OwnRepository,
) -> None:
    text = OP.format(name="never", body="x + x").replace("    timed=[Case(N=16, D=8)],\n", "")
    (repository.root / "kernels/never.py").write_text(text)
    git("add", "--all")
    git("commit", "--quiet", "--message=never")
    (repository.root / "README.md").write_text("words")
    gated = repository.gate()
    assert gated.status == 0, gated.out
    assert "never-sum-N3145728D8-fp32/forward+backward" in gated.outcomes


@pytest.mark.long
def test_a_gate_that_is_ended_early_writes_its_report_and_is_not_green(
    repository: OwnRepository,
) -> None:
    repository.edit("own_helper.py", "1.0", "1.0 + 0.0")
    gated = repository.gate("--time-limit", "12")
    assert gated.status == 2, gated.out
    assert gated.report["ended"] == "the time limit of 12 s"
    assert repository.run("tinyllama", "gate", "--verify", "build/gate.json").status == 2


@pytest.mark.slow("it times benchmarks for a minute")
def test_twice_the_work_is_slower(repository: OwnRepository) -> None:
    sized = repository.root / "kernels/once.py"
    sized.write_text(sized.read_text().replace("N=16, D=8", "N=1024, D=1024"))
    git("commit", "--quiet", "--all", "--message=larger")
    repository.edit("kernels/once.py", "return x + x", "y = x + x\n    return (x + x + y) / 2.0")
    gated = repository.gate()
    assert gated.status == 10, gated.out
    slower = [name for name, outcome in gated.outcomes.items() if outcome == "SLOWER"]
    assert slower == ["once-sum-N1024D1024-fp32/forward+backward"]


REFUSED = {
    "no base": [],
    "no such commit": ["--against", "v9"],
    "the tree itself": ["--against", "main"],
    "an empty option": ["--against", "main", "--tree", ""],
    "an unknown device": ["--against", "main", "--device", "tpu"],
    "no folder of blocks": ["--against", "main", "--results-dir", "nowhere"],
    "no such tree": ["--against", "main", "--tree", "nowhere"],
    "no interpreter": ["--against-env", "nowhere/python"],
    "a report that git tracks": ["--against", "main", "--gate-json", "pyproject.toml"],
    "two reports in one place": [
        *("--against", "main", "--gate-json", "a", "--summary-markdown", "a")
    ],
    "no file of ops": ["--against", "main", "--ops", "none.py"],
    "no limit": ["--against", "main", "--time-limit", "0"],
    "no report": ["--against", "main", "--verify", "none.json"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_unusable_option_is_refused_before_anything_starts(
    repository: OwnRepository, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinyllama.cli import main

    assert main(["gate", *REFUSED[why]]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("tinyllama: error: ")
    assert "\n" not in said
    assert not git("status", "--porcelain"), "and every file is as it was"


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.6, 1.5])
def test_an_early_interrupt_ends_a_gate_without_a_traceback(
    repository: OwnRepository, seconds: float
) -> None:
    """While the judge's process imports torch."""
    repository.edit("own_helper.py", "1.0", "1.0 + 0.0")
    command = [sys.executable, "-m", "tinyllama", "gate", "--against", "main", "--device", "cpu"]
    with subprocess.Popen(
        command,
        cwd=repository.root,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode in (2, 130)
    assert "Traceback" not in said
