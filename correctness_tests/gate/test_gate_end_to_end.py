"""A copy of this tree in a repository of its own, gated by the command that a user types."""

import shutil
from pathlib import Path

import pytest

from correctness_tests.support.commands import ROOT
from correctness_tests.support.own_repository import Checkout, committed


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """``main`` is this tree; what is edited is the candidate."""
    root = tmp_path / "tree"
    for name in ("tinyllama", "perf_tests", "correctness_tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pytest.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    return Checkout(committed(root, {}, monkeypatch))


@pytest.mark.slow("it lists the benchmarks of a copy of this tree on two sides")
def test_neither_a_comment_nor_an_edited_rule_changes_a_verdict(checkout: Checkout) -> None:
    """All are IDENTICAL, and nothing is timed. The base's harness judges: what the candidate's
    would decide of itself is shown, and not asked."""
    for name in ("tinyllama/ops/rms_norm/__init__.py", "tinyllama/harness/check/evaluate.py"):
        checkout.edit(name, "\nimport torch\n", "\n# A comment.\n\nimport torch\n")
    rule = "tinyllama/harness/gate/sequential_test.py"
    for name in (rule, "conftest.py", "perf_tests/conftest.py"):
        path = checkout.root / name
        path.write_text(f"import os\n\nos._exit(0)\n{path.read_text()}")
    gated = checkout.gate()
    assert {*gated.outcomes.values()} == {"IDENTICAL"}, gated.out
    assert {name.partition("-")[0] for name in gated.outcomes} > {"rms_norm", "attention", "step"}
    assert gated.status == 0, gated.out
    assert rule in gated.out
    assert "evaluate.py" not in gated.out, "a comment alone"
