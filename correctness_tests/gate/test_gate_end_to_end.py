"""A copy of this tree in a repository of its own, gated by the command that a user types.

Each of these lists every benchmark on two sides and times some, so all are in the slow lane. What
`make test` has of the command: gates of a small repository (test_gate_command.py).
"""

import json
import os
import shutil
import subprocess
import sys
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
QUIET = "import os\nos.getloadavg = lambda: (0.0, 0.0, 0.0)\n"
TWICE = """
    wide = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    found = 0
    for _ in range(4):
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        found = found + wide * rstd * weight_D / 4
    return found.to(x_BTD.dtype)
"""


class Repository:
    """``main`` is this tree; what is edited is the candidate."""

    def __init__(self, folder: Path) -> None:  # a toy op is among those of the tree
        self.root, self.temporary = folder / "tree", folder / "temporary"
        for folder_to_make in (self.temporary, self.root / "results"):
            folder_to_make.mkdir(parents=True)
        for name in ("tinyllama", "perf_tests", "correctness_tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.root / name, ignore=ignored)
        for name in ("conftest.py", "pytest.ini", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "tinyllama/ops/first.py").write_text(FIRST)
        (folder / "sitecustomize.py").write_text(QUIET)
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
            noise.blocks.append(Block(date, "c0ffee", versions(), 10, {name: {DEVICE: value}}))
        noise.save(self.root / "results")

    def gate(self, *options: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        """Exit status, the verdicts by name, and what was printed."""
        report = self.temporary / "gate.json"
        variables = {"PYTHONPATH": str(self.root.parent), "TMPDIR": str(self.temporary)}
        arguments = ("--device=cpu", "--against=main", f"--gate-json={report}")
        done = subprocess.run(
            [sys.executable, "-m", "tinyllama", "gate", *arguments, *options],
            cwd=self.root,
            env={**ENVIRONMENT, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        text = done.stdout + done.stderr
        assert report.exists(), text
        content = json.loads(report.read_text())
        assert content["status"] == done.returncode, text
        return done.returncode, {verdict["name"]: verdict for verdict in content["verdicts"]}, text


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
COPIED = """        if not x.is_contiguous():
            for _ in range(30):
                x = x.clone()
        return 3 * x[:, 0]
"""
GIT_ROLES = ("AUTHOR", "COMMITTER")


pytestmark = pytest.mark.slow("gates of a copy of this tree, on two sides")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_neither_a_comment_nor_an_edited_rule_changes_a_verdict(repository: Repository) -> None:
    """All are IDENTICAL, and nothing is timed. The base's harness judges: what the candidate's
    would decide of itself is shown, and not asked."""
    for name in ("tinyllama/ops/rms_norm/__init__.py", "tinyllama/harness/check/evaluate.py"):
        repository.edit(name, "\nimport torch\n", "\n# A comment.\n\nimport torch\n")
    rule = "tinyllama/harness/gate/sequential_test.py"
    for name in (rule, "conftest.py", "perf_tests/conftest.py"):
        path = repository.root / name
        path.write_text(f"import os\n\nos._exit(0)\n{path.read_text()}")
    status, verdicts, text = repository.gate()
    assert {verdict["outcome"] for verdict in verdicts.values()} == {"IDENTICAL"}, text
    assert {name.partition("-")[0] for name in verdicts} > {"rms_norm", "attention", "step"}
    assert "undecided" not in text, "no block is announced"
    assert status == 0, text
    assert rule in text
    assert "evaluate.py" not in text, "a comment alone"


def test_an_op_that_the_base_lacks_is_new_and_other_ops_are_identical(
    repository: Repository,
) -> None:
    shutil.copy(ROOT / "docs/examples/softmax.py", repository.root / "tinyllama/ops/softmax.py")
    status, verdicts, text = repository.gate("--op=softmax", "--op=rms_norm")
    assert status == 0, text
    new = {name for name, verdict in verdicts.items() if verdict["outcome"] == "NEW"}
    assert {name.partition("-")[0] for name in new} == {"softmax"}, text
    assert {verdict["outcome"] for verdict in verdicts.values()} == {"IDENTICAL", "NEW"}, text


def test_real_work_makes_its_op_slower_and_leaves_others_identical(
    repository: Repository,
) -> None:
    """Four times the work: the first look and four blocks more are enough, without a history."""
    source = (ROOT / "tinyllama/ops/rms_norm/__init__.py").read_text()
    begin = source.index("    wide = x_BTD", source.index("def eager"))
    end = source.index("@rms_norm.provider", begin)
    repository.edit(
        "tinyllama/ops/rms_norm/__init__.py", source[begin:end], TWICE.lstrip("\n") + "\n\n"
    )
    name = "rms_norm-eager-B4T64D128-fp32/forward+backward"
    status, verdicts, text = repository.gate("--op=rms_norm", "--op=rope")
    slower = [name for name, verdict in verdicts.items() if verdict["outcome"] == "SLOWER"]
    assert slower == [name], text
    assert status == 10, text
    said = verdicts[name]["text"]
    assert "in 4 blocks, confirmed by +" in said
    assert "aten::" in said, "the operators that moved"
    outcomes = {
        verdict["outcome"]
        for benchmark, verdict in verdicts.items()
        if benchmark.startswith("rope")
    }
    assert outcomes == {"IDENTICAL"}


def test_a_copy_of_strided_inputs_alone_is_slower_on_these_alone(repository: Repository) -> None:
    """The documented fault: dense inputs as before, all others copied first."""
    contiguous = "first-manual-N512D512-fp32/forward+backward"
    strided = contiguous.replace("fp32", "fp32-strided")
    for name in (contiguous, strided):
        repository.history(name, spread=0.05)
    repository.edit("tinyllama/ops/first.py", COLUMN, "        return 3 * x.contiguous()[:, 0]\n")
    results = f"--results-dir={repository.root / 'results'}"
    status, verdicts, text = repository.gate("--op=first", results)
    assert verdicts[strided]["outcome"] == "SLOWER", text
    assert verdicts[contiguous]["outcome"] in ("SAME", "NOT DECIDED"), text
    assert status == 10
    assert "aten::copy_" in verdicts[strided]["text"]


def test_a_new_provider_that_copies_strided_inputs_is_slower(repository: Repository) -> None:
    """No base can be compared: the op's bar on layouts decides."""
    second = FIRST.replace(COLUMN, COPIED).replace("first", "second")
    (repository.root / "tinyllama/ops/second.py").write_text(second)
    status, verdicts, text = repository.gate("--op=second")
    strided = "second-manual-N512D512-fp32-strided/forward+backward"
    outcomes = {name: verdict["outcome"] for name, verdict in verdicts.items()}
    assert outcomes.pop(strided) == "SLOWER", text
    assert set(outcomes.values()) == {"NEW"}, text
    assert status == 10
