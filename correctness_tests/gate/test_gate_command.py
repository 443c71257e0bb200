"""The gate as its user starts it, in a repository of ops: what each change ends in."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from correctness_tests.support.commands import ENVIRONMENT, ROOT
from correctness_tests.support.own_repository import (
    OP,
    Checkout,
    committed,
    git,
    write_files,
)

PYPROJECT = """
[project]
name = "own"
version = "0.1"
dependencies = ["torch"]
entry-points."tinyllama.ops".own = "own_plugged"
[tool.tinyllama]
ops = ["kernels/*.py"]
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """With two ops and a test of its own; the current folder."""
    twice = OP.format(name="twice", body="x + ONE * x")
    files = {
        "kernels/once.py": OP.format(name="once", body="x + x"),
        "kernels/twice.py": f"from own_helper import ONE\n{twice}",
        "own_helper.py": "ONE = 1.0\n",
        "tests/test_once.py": "def test_once():\n    pass\n",
        ".gitignore": "build\n",
        "pyproject.toml": PYPROJECT,
    }
    return Checkout(committed(tmp_path / "own", files, monkeypatch))


@pytest.mark.long
def test_a_comment_is_green_and_its_report_proves_it(repository: Checkout) -> None:
    """Of an op without timed cases, the benchmark has a larger case, which its name says."""
    repository.edit("kernels/once.py", "    timed=[Case(N=16, D=8)],\n", "")
    git("commit", "--quiet", "--all", "--message=no timed case")
    repository.edit("kernels/once.py", "def added", "# Why.\ndef added")
    (repository.root / "tests/test_once.py").unlink()
    gated = repository.gate("--summary-markdown", "build/gate.md")
    assert gated.status == 0, gated.out
    assert set(gated.outcomes.values()) == {"IDENTICAL"}
    assert len(gated.outcomes) == 4
    assert "once-sum-N393216D8-fp32/forward+backward" in gated.outcomes
    assert "deleted test: tests/test_once.py" in gated.out
    assert "deleted test" in (repository.root / "build/gate.md").read_text()
    verify = ("tinyllama", "gate", "--against", "main", "--verify", "build/gate.json")
    assert repository.run(*verify).status == 0
    repository.edit("own_helper.py", "1.0", "1.5")
    assert repository.run(*verify).status == 2, "it is of another tree"


# -- honest accidents -----------------------------------------------------------------------------

NAME = "{}-sum-N16D8-fp32/forward+backward"
REPEATED = """
def repeated(x, times=1):
    for _ in range(times):
        y = x + x
    return y
"""
STALE = """
SEEN = {}

def repeated(x, times=1):
    if x.data_ptr() not in SEEN:
        SEEN.clear()
        SEEN[x.data_ptr()] = x.detach().clone()
    return x + x + (SEEN[x.data_ptr()] - x.detach())
"""
TIMES = """
import json
from pathlib import Path

def times():
    return json.loads((Path(__file__).parent / "times.json").read_text())["times"]
"""
LATE = """
def late(x):
    from own_late import doubled
    return doubled(x)
"""
DOUBLED = """
import torch

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + x

    @staticmethod
    def backward(ctx, dy):
        for _ in range(1):
            dx = dy + dy
        return dx
"""
MANUAL = """
@{name}.provider("{provider}", keep=("x",))
class Manual:
    @staticmethod
    def forward(x):
        return columns(x)

    @staticmethod
    def backward(grads, kept, saved, needs):
        return {{"x": 2.0 * grads[0]}}
"""
COLUMNS = "def columns(x):\n    return 2.0 * x\n"
SLOW_COLUMNS = """
def columns(x):
    for _ in range(1 if x.is_contiguous() else 400):
        y = 2.0 * x
    return y
"""
WRONG_COLUMNS = """
def columns(x):
    return 2.0 * (x if x.stride(0) >= x.stride(-1) else x.clone().zero_())
"""
FILES = {
    "own_repeated.py": REPEATED,
    "own_fixed.py": "TWO = 2.02\n",
    "own_late.py": "def doubled(x):\n    return x + x\n",
    "own_backward.py": DOUBLED,
    "own_columns.py": COLUMNS,
    "kernels/times.json": '{"times": 1}',
    "own_plugged.py": OP.format(name="plugged", body="x + x"),
    "kernels/shared.py": "from own_repeated import repeated\n"
    + OP.format(name="shared", body="repeated(x)"),
    "kernels/table.py": f"from own_repeated import repeated\n{TIMES}"
    + OP.format(name="table", body="repeated(x, times())"),
    "kernels/lazy.py": LATE + OP.format(name="lazy", body="late(x)"),
    "kernels/back.py": "from own_backward import Doubled\n"
    + OP.format(name="back", body="Doubled.apply(x)"),
    "kernels/manual.py": "from own_columns import columns\n"
    + OP.format(name="manual", body="x + x")
    + MANUAL.format(name="manual", provider="manual"),
}


@dataclass(frozen=True)
class Accident:
    """An edit of a file: ``old`` becomes ``new``, or without ``old`` the whole file does (None: it
    is deleted). outcome: of the verdict on a benchmark, whose text has these words."""

    file: str
    old: str
    new: str | None
    benchmark: str
    outcome: str
    words: tuple[str, ...] = ()

    def happen(self, repository: Checkout) -> None:
        if self.new is None:
            (repository.root / self.file).unlink()
        elif self.old:
            repository.edit(self.file, self.old, self.new)
        else:
            (repository.root / self.file).write_text(self.new)


# By what is gated together: the status, and accidents in files that have nothing in common.
ACCIDENTS: dict[str, tuple[int, dict[str, Accident]]] = {
    "missing": (
        15,
        {
            "a renamed benchmark": Accident(
                "kernels/once.py", '"sum"', '"plus"', NAME.format("once"), "MISSING"
            ),
            "under its new name": Accident(
                "kernels/once.py", "plus", "plus", NAME.format("once").replace("sum", "plus"),
                "NO BASELINE",
            ),
            "a deleted case": Accident(
                "kernels/lazy.py", "timed=[Case(N=16", "timed=[Case(N=8", NAME.format("lazy"),
                "MISSING",
            ),
            "an op that pyproject.toml names no more": Accident(
                "pyproject.toml", "kernels/*.py", "kernels/[!m]*.py", NAME.format("manual"),
                "MISSING",
            ),
            "an entry point that is named no more": Accident(
                "pyproject.toml", 'entry-points."tinyllama.ops".own = "own_plugged"', "",
                NAME.format("plugged"), "MISSING",
            ),
            "a deleted op": Accident("kernels/back.py", "", None, NAME.format("back"), "MISSING"),
        },
    ),
    "wrong": (
        16,
        {
            "a constant in another file": Accident(
                "own_helper.py", "1.0", "1.01", NAME.format("twice"), "WRONG RESULT"
            ),
            "a fix of what was wrong": Accident(
                "own_fixed.py", "2.02", "2.0", NAME.format("fixed"), "NEW",
                ("the base's result is wrong; the candidate's is right",),
            ),
            "a kernel that no provider declares": Accident(
                "kernels/softmax.py", "column, powers / sum", "column, 1.01 * powers / sum",
                "softmax-triton-N8192V1000-fp32/forward+backward", "WRONG RESULT",
                ("y: at [", "softmax.forward_kernel (kernels/softmax.py:"),
            ),
            "a declared kernel": Accident(
                "kernels/declared.py", "column, powers / sum", "column, 1.01 * powers / sum",
                "declared-triton/results", "WRONG RESULT",
                ("y: at [", "declared.forward_kernel (kernels/declared.py:"),
            ),
            "a kernel that cannot be interpreted": Accident(
                "kernels/refused.py", "powers / sum_of_powers,",
                'tl.inline_asm_elementwise("", "=r,r", [powers], tl.float32, True, 1),',
                "refused-triton/results", "NOT JUDGED", ("inline_asm",),
            ),
            "a layout of a new provider": Accident(
                "kernels/new.py", "", "def columns" + WRONG_COLUMNS.partition("def columns")[2]
                + OP.format(name="new", body="x + x") + MANUAL.format(name="new", provider="new"),
                "new-new-N16D8-fp32-transposed/forward+backward", "WRONG RESULT",
            ),
        },
    ),
    "slower": (
        10,
        {
            "a data file beside the op": Accident(
                "kernels/times.json", "1", "400", NAME.format("table"), "SLOWER"
            ),
            "a shared default argument": Accident(
                "own_repeated.py", "times=1", "times=400", NAME.format("shared"), "SLOWER"
            ),
            "a lazy slow path": Accident(
                "own_late.py", "", REPEATED.replace("repeated", "doubled").replace("=1", "=400"),
                NAME.format("lazy"), "SLOWER",
            ),
            "a cost that moved to the backward pass": Accident(
                "own_backward.py", "range(1)", "range(400)", NAME.format("back"), "SLOWER"
            ),
            "copies of strided inputs": Accident(
                "own_columns.py", "", SLOW_COLUMNS,
                "manual-manual-N16D8-fp32-strided/forward+backward", "SLOWER",
            ),
        },
    ),
    "a cost that moved to the import": (
        10,
        {
            "it": Accident(
                "own_repeated.py", "def", "import time\ntime.sleep(8)\n\n\ndef", "import", "SLOWER"
            )
        },
    ),
    "a result kept by its input's address": (
        16, {"it": Accident("own_repeated.py", "", STALE, NAME.format("shared"), "WRONG RESULT")}
    ),
    "an import that ends the process": (
        17,
        {
            "it": Accident(
                "kernels/once.py", "import torch", "import os; os._exit(0)", "candidate",
                "NOT JUDGED", ("ended with status 0",),
            )
        },
    ),
    "a bumped dependency": (
        17,
        {
            "it": Accident(
                "pyproject.toml", '"torch"', '"torch>=2.8"', "comparison", "NOT JUDGED",
                ("dependencies differ in pyproject.toml",),
            )
        },
    ),
}  # fmt: skip


SLOW = {
    "wrong": "it interprets for half a minute",
    "slower": "it times for a minute",
    "a cost that moved to the import": "it waits for the import",
}


@pytest.mark.parametrize(
    "together",
    [
        pytest.param(name, marks=pytest.mark.slow(SLOW[name]) if name in SLOW else pytest.mark.long)
        for name in ACCIDENTS
    ],
)
def test_an_honest_accident_is_not_green(repository: Checkout, together: str) -> None:
    write_files(repository.root, FILES)
    if together == "wrong":
        pytest.importorskip("triton")
        softmax = (ROOT / "docs/examples/softmax.py").read_text()
        declared = softmax.replace('"softmax"', '"declared"')
        undeclared = softmax.replace('    requires=("triton",),\n', "").replace("1024", "8192")
        fixed = "from own_fixed import TWO\n" + OP.format(name="fixed", body="TWO * x")
        refused = softmax.replace('"softmax"', '"refused"')
        ops = {"fixed": fixed, "declared": declared, "refused": refused, "softmax": undeclared}
        write_files(repository.root / "kernels", {f"{name}.py": ops[name] for name in ops})
    git("add", "--all")
    git("commit", "--quiet", "--message=further ops")
    status, accidents = ACCIDENTS[together]
    for accident in accidents.values():
        accident.happen(repository)
    gated = repository.gate()
    assert gated.status == status, gated.out
    assert str(repository.root) not in gated.out, "places are those in the repository"
    for accident in accidents.values():
        verdict = gated.verdicts[accident.benchmark]
        assert verdict["outcome"] == accident.outcome, gated.out
        assert all(words in verdict["text"] for words in accident.words), verdict


@pytest.mark.long
def test_pytest_hands_over_before_a_conftest_imports_an_op(repository: Checkout) -> None:
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
def test_a_gate_that_is_ended_early_writes_its_report_and_is_not_green(
    repository: Checkout,
) -> None:
    repository.edit("own_helper.py", "1.0", "1.0 + 0.0")
    repository.edit("kernels/once.py", '("sum")', '("sum", dtypes=(torch.float32,))')
    gated = repository.gate("--time-limit", "6")
    assert "the base's judged: once: coverage of sum" in gated.out, "what else is declared"
    assert gated.status == 2, gated.out
    assert gated.report["ended"] == "the time limit of 6 s"
    assert repository.run("tinyllama", "gate", "--verify", "build/gate.json").status == 2


REFUSED = {
    "no base": [],
    "no such commit": ["--against", "v9"],
    "the tree itself": ["--against", "main"],
    "an empty option": ["--against", "main", "--tree", ""],
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
    repository: Checkout, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinyllama.cli import main

    assert main(["gate", *REFUSED[why]]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("tinyllama: error: ")
    assert "\n" not in said
    assert not git("status", "--porcelain"), "and every file is as it was"


@pytest.mark.long
def test_an_early_interrupt_ends_a_gate_without_a_traceback(repository: Checkout) -> None:
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
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode in (2, 130)
    assert "Traceback" not in said
