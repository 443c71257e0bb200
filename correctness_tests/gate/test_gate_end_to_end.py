"""A copy of this tree in a repository of its own, gated by the command that a user types.

Each of these lists and observes every benchmark on two sides, so all are in the slow lane. What
`make test` has of them: a whole gate of a small tree, by the same command, with a conftest that
ends the judge (test_gate_own.py); whose harness judges, and which files do (test_gate_judge.py);
that all benchmarks of the tree are listed (test_gate_side.py).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.commands import ENVIRONMENT, ROOT
from tinyllama.harness.gate.calibrate import Block, Noise
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.records.results import versions

# A machine that nobody else uses, whoever does: the load of one that runs tests is no reason.
# GATE_ONLY names the benchmarks that are compared, where there is no time for all of them.
QUIET = """
import os
from dataclasses import replace

os.getloadavg = lambda: (0.0, 0.0, 0.0)

from tinyllama.harness.gate import comparison
from tinyllama.harness.gate.pair import Effort
from tinyllama.harness.gate.schedule import timing_processor
from tinyllama.harness.gate.session import Session

names = tuple(filter(None, os.environ.get("GATE_ONLY", "").split(",")))


def session(setting):
    only = (lambda name: name.startswith(names)) if names else None
    effort = replace(Effort.on(setting.device), pairs=10, repeated=10)
    assert setting.processor == timing_processor(setting.device)
    return Session(replace(setting, only=only, effort=effort))


comparison.Session = session
"""
TWICE = """
    wide = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    found = 0
    for _ in range(4):
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        found = found + wide * rstd * weight_D / 4
    return found.to(x_BTD.dtype)
"""


PYTEST = ("-m", "pytest", "perf_tests", "--benchmark-compare")


class Repository:
    """``main`` is this tree; what is edited is the candidate."""

    def __init__(self, folder: Path) -> None:  # a toy op is among those of the tree
        self.root, self.temporary = folder / "tree", folder / "temporary"
        for made in (self.temporary, self.root / "results"):
            made.mkdir(parents=True)
        for name in ("tinyllama", "perf_tests", "correctness_tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.root / name, ignore=ignored)
        for name in ("conftest.py", "pytest.ini", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "tinyllama/ops/first.py").write_text(FIRST)
        (folder / "quiet_machine.py").write_text(QUIET)
        for args in (["init", "-q", "-b", "main"], ["add", "--all"], ["commit", "-q", "-m", "all"]):
            who = {f"GIT_{who}_{what}": "a@b" for who in GIT_ROLES for what in ("NAME", "EMAIL")}
            subprocess.run(["git", *args], cwd=self.root, env={**os.environ, **who}, check=True)

    def edit(self, name: str, before: str, after: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def history(self, name: str, spread: float, blocks: int = 40) -> None:
        """Equal sides on this machine, so that fewer blocks tell."""
        noise = Noise(device_name(torch.device("cpu")))
        for number in range(blocks):
            value = spread if number % 2 else -spread
            date = f"2030-01-01T00:00:{number:02}Z"
            noise.add(Block(date, "c0ffee", versions(), 10, {name: {DEVICE: value}}))
        noise.save(self.root / "results")

    def gate(
        self, *only: str, command: Sequence[str] = PYTEST
    ) -> tuple[int, dict[str, dict[str, Any]], str]:
        """Exit status, the verdicts by name, and what was printed."""
        report = self.temporary / "gate.json"
        own = {
            "PYTHONPATH": str(self.root.parent),  # and the tree by pytest.ini
            "PYTEST_PLUGINS": "quiet_machine",  # of the judge's process
            "TMPDIR": str(self.temporary),  # where devices are locked
            "GATE_ONLY": ",".join(only),
        }
        kept = {name: value for name, value in ENVIRONMENT.items() if "PYTEST" not in name}
        done = subprocess.run(
            [
                *(sys.executable, *command, "--device=cpu", "--against=main"),
                *(f"--gate-json={report}", f"--results-dir={self.root / 'results'}"),
            ],
            cwd=self.root,
            env={**kept, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        text = done.stdout + done.stderr
        assert report.exists(), text
        content = json.loads(report.read_text())
        assert content["status"] == done.returncode, text
        return done.returncode, {one["name"]: one for one in content["verdicts"]}, text


FIRST = """
import torch

from tinyllama.harness import Case, Op, Tensor

first = Op(
    "first",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    cases=[Case(N=3, D=8)],
    timed=[Case(N=512, D=512)],
)


@first.reference
def eager(x: torch.Tensor) -> torch.Tensor:
    return 3 * x[:, 0]


@first.independent("torch.select")
def stock(x: torch.Tensor) -> torch.Tensor:
    return torch.select(x, 1, 0) * 3


@first.provider("manual", keep=("x",))
class Manual:
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 3 * x[:, 0]

    @staticmethod
    def backward(grads, kept, saved, needs):
        dx = grads[0].new_zeros(kept["x"].shape)
        dx[:, 0] = 3 * grads[0]
        return {"x": dx}
"""

COLUMN = "        return 3 * x[:, 0]\n"
GIT_ROLES = ("AUTHOR", "COMMITTER")


pytestmark = pytest.mark.slow("gates of a copy of this tree, on two sides")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_neither_a_comment_nor_an_edited_rule_changes_a_verdict(repository: Repository) -> None:
    """All are IDENTICAL, and nothing is timed. The base's harness judges, with its conftest and its
    configuration: what the candidate's would decide of itself is not asked."""
    for name in ("tinyllama/ops/rms_norm/__init__.py", "tinyllama/harness/check/evaluate.py"):
        repository.edit(name, "\nimport torch\n", "\n# A comment.\n\nimport torch\n")
    rule = "tinyllama/harness/gate/decision.py"
    for name in (rule, "conftest.py", "perf_tests/conftest.py"):
        path = repository.root / name
        path.write_text(f"import os\n\nos._exit(0)\n{path.read_text()}")
    (repository.root / "conftest.py").write_text("pytest_plugins = []\n")  # that a user starts it
    command = ["-m", "tinyllama", "gate", "perf_tests", "--device=cpu", "--against=main"]
    status, verdicts, text = repository.gate(command=command)
    judge = verdicts.pop("judge")["text"]
    assert {one["outcome"] for one in verdicts.values()} == {"IDENTICAL"}, text
    assert {name.partition("-")[0] for name in verdicts} > {"rms_norm", "attention", "step"}
    assert "undecided" not in text, "no block is announced"
    assert status == 19, text
    assert f"{rule} (" in judge
    assert "perf_tests/conftest.py (" in judge
    assert "rms_norm" not in judge
    assert "evaluate.py" not in judge, "a comment alone"


def test_a_comment_alone_is_green(repository: Repository) -> None:
    name = "tinyllama/ops/rms_norm/__init__.py"
    repository.edit(name, "\nimport torch\n", "\n# A comment.\n\nimport torch\n")
    status, verdicts, text = repository.gate()
    assert {one["outcome"] for one in verdicts.values()} == {"IDENTICAL"}, text
    assert status == 0


def test_an_op_that_the_base_lacks_is_new_and_other_ops_are_identical(
    repository: Repository,
) -> None:
    shutil.copy(ROOT / "docs/examples/softmax.py", repository.root / "tinyllama/ops/softmax.py")
    status, verdicts, text = repository.gate("softmax", "rms_norm", "attention")
    assert status == 0, text
    new = {name for name, one in verdicts.items() if one["outcome"] == "NEW"}
    assert new
    assert {name.partition("-")[0] for name in new} == {"softmax"}, text
    assert {one["outcome"] for one in verdicts.values()} == {"IDENTICAL", "NEW"}, text
    assert "device_seconds" in verdicts[min(new)]["text"]


def test_real_work_is_slower_by_name_and_what_does_not_run_it_is_identical(
    repository: Repository,
) -> None:
    source = (ROOT / "tinyllama/ops/rms_norm/__init__.py").read_text()
    begin = source.index("    wide = x_BTD", source.index("def eager"))
    end = source.index("@rms_norm.provider", begin)
    repository.edit(
        "tinyllama/ops/rms_norm/__init__.py", source[begin:end], TWICE.lstrip("\n") + "\n\n"
    )
    name = "rms_norm-eager-B4T64D128-fp32/forward+backward"
    repository.history(name, spread=0.05)
    status, verdicts, text = repository.gate("rms_norm-eager", "rope", "adamw", "transpose")
    slower = [name for name, one in verdicts.items() if one["outcome"] == "SLOWER"]
    assert slower == [name], text
    assert status == 19, "the reference is not the base's"
    assert "rms_norm: reference (" in verdicts.pop("judge")["text"]
    said = verdicts.pop(name)["text"]
    assert {one["outcome"] for one in verdicts.values()} == {"IDENTICAL"}
    assert "confirmed by +" in said
    assert "aten::" in said, "the operators that moved"


def test_a_copy_of_strided_inputs_alone_is_slower_on_these_alone(repository: Repository) -> None:
    """The documented fault: dense inputs as before, all others copied first."""
    plain = "first-manual-N512D512-fp32/forward+backward"
    strided = plain.replace("fp32", "fp32-strided")
    for name in (plain, strided):
        repository.history(name, spread=0.05)
    repository.edit("tinyllama/ops/first.py", COLUMN, "        return 3 * x.contiguous()[:, 0]\n")
    status, verdicts, text = repository.gate("first-manual")
    assert verdicts[strided]["outcome"] == "SLOWER", text
    assert verdicts[plain]["outcome"] in ("SAME", "NOT DECIDED"), text
    assert set(verdicts) == {plain, strided}
    assert status == 10
    assert "aten::copy_" in verdicts[strided]["text"]
