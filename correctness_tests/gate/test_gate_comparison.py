"""The digest of a tree's files by which it is seen that one was written to; its instrument."""

import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from correctness_tests.support.judged import tree
from tinyllama.harness.gate import comparison
from tinyllama.harness.gate.pair import BASE, Tree


def test_the_state_of_a_tree_is_of_every_file_and_of_bytecode(tmp_path: Path) -> None:
    files = tree(tmp_path / "base", {"a.py": "x = 1\n", "__pycache__/a.pyc": "1", "b.so": "1"})
    one = Tree(BASE, tmp_path / "base", "python", "main", tmp_path / "caches")
    before = comparison.state(one, tmp_path)
    assert comparison.state(one, tmp_path) == before
    for path in files.values():
        text = path.read_text()
        path.write_text("other")
        assert comparison.state(one, tmp_path) != before
        path.write_text(text)
    tree(tmp_path / "base", {"new.json": "{}"})
    assert comparison.state(one, tmp_path) != before


@pytest.mark.parametrize("inside", [False, True])
def test_the_state_of_a_checkout_is_of_what_git_lists(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a copy, whatever lies in it; of both, where a link leads and not what is there."""
    root, far = tmp_path / "base", tmp_path / "far.py"
    files = tree(root, {"a.py": "1", "b.py": "1", "z.py": "1", "more/z.so": "1"})
    far.write_text("1")
    (root / "m.py").symlink_to(far)
    listed = [root / "m.py", *(files[name] for name in ("z.py", "a.py"))]
    monkeypatch.setattr(comparison, "tracked_files", lambda _: [*listed, root / "gone.py"])
    monkeypatch.setattr(comparison, "untracked_code", lambda _: [files["b.py"]])
    one = Tree(BASE, root, "python", "main", tmp_path / "caches")
    copies = tmp_path if inside else tmp_path / "copies"
    before = comparison.state(one, copies)
    for name, path in files.items():
        path.write_text("2")
        assert (comparison.state(one, copies) == before) is (name == "more/z.so" and not inside), (
            name
        )
        path.write_text("1")
    far.write_text("2")
    assert comparison.state(one, copies) == before
    (root / "m.py").unlink()
    (root / "m.py").symlink_to(tmp_path / "farther.py")
    assert comparison.state(one, copies) != before


def test_both_trees_are_instrumented_and_their_bytecode_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [tmp_path / name for name in ("base", "candidate")]
    given, registered, files = Mock(), Mock(), ["a.py"]
    popen: Any = given.compiled
    monkeypatch.setattr(comparison, "instrument", lambda *_: files)
    monkeypatch.setattr(comparison, "check_tree", given.checked)
    monkeypatch.setattr(comparison, "overlay", given.overlaid)
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    comparison._instrumented(trees[0], trees[1], registered)
    assert [call.args[0] for call in given.checked.call_args_list] == trees
    assert [call.args[1:] for call in given.overlaid.call_args_list] == [(t, files) for t in trees]
    compiled = [call.args[0][-3:] for call in popen.call_args_list]
    assert compiled == [["-j", "2", str(one / "tinyllama")] for one in trees]
