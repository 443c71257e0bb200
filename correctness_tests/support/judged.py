"""Trees of files that a judge looks at, and a repository with two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from correctness_tests.support.gated_suite import git, plain_git
from tinyllama.harness.gate import judge

DECISION = "tinyllama/harness/gate/decision.py"


def tree(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {name: folder / name for name in files}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``old`` has a harness that can judge no other tree, ``new`` one that can."""
    plain_git(monkeypatch)
    root = tmp_path / "tree"
    for tag, name in (("old", DECISION), ("new", judge.ABLE)):
        tree(root, {name: f"# {tag}\n"})
        monkeypatch.chdir(root)
        git("init", "--quiet", "--initial-branch=main")
        git("add", "--all")
        git("commit", "--quiet", f"--message={tag}")
        git("tag", tag)
    (root / judge.ABLE).write_text("# the candidate's\n")
    return root
