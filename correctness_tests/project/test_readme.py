"""README's examples, run as a reader would: each command prints what the page shows."""

import re
import shutil
from pathlib import Path

import pytest

from correctness_tests.support.commands import ROOT, python
from correctness_tests.support.own_repository import first_commit, plain_git

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", README, re.M | re.S)


def block(start: str) -> str:
    """The block of code that contains this text; there is one."""
    (text,) = (text for text in BLOCKS if start in text)
    return str(text)


def missing(shown: str, output: str) -> list[str]:
    """The lines behind a block's command that no output has; ``...`` stands for any text."""
    lines = [line for line in shown.splitlines()[1:] if line != "..."]
    patterns = (".*".join(map(re.escape, line.split("..."))) for line in lines)
    return [pattern for pattern in patterns if not re.search(pattern.rstrip(), output)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("triton")
    shutil.copy(ROOT / "docs/examples/hasty_softmax.py", tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_assertion_in_a_test_fails_as_shown(folder: Path) -> None:
    (folder / "test_softmax.py").write_text(block("# test_softmax.py"), encoding="utf-8")
    done = python("-m", "pytest", "test_softmax.py", "-p", "no:cacheprovider", cwd=folder)
    assert done.returncode == 1
    assert not missing(block("$ pytest test_softmax.py"), done.stdout), done.stdout


@pytest.mark.slow("a check in a process of its own takes a quarter of a minute")
def test_the_check_without_a_declaration_finds_what_is_shown(folder: Path) -> None:
    shown = block("$ tinyllama check")
    command = ["check", "hasty_softmax.py:softmax", "--like", "torch.softmax"]
    words = [*command, "--shape", "N D", "--param", "dim=-1"]
    assert re.sub("['\"]", "", shown.splitlines()[0]) == f"$ tinyllama {' '.join(words)}"
    done = python("-m", "tinyllama", *words, cwd=folder)
    assert done.returncode == 1
    assert not missing(shown, done.stdout), done.stdout


@pytest.mark.slow("two gates in processes of their own take a quarter of a minute")
def test_the_gate_says_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    repository = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "docs/examples/repository", repository, ignore=ignored)
    monkeypatch.chdir(repository)
    plain_git(monkeypatch)
    first_commit()
    kernels = repository / "my_kernels/squared_relu.py"
    text = kernels.read_text(encoding="utf-8")
    changes = (
        text.replace("@jit\n", "# a comment\n@jit\n"),
        text.replace("2.0 * seen * up", "2.0 * up"),
    )
    command = "$ tinyllama gate --against main"
    shown = block(command).split(command)[1:]
    for changed, output in zip(changes, shown, strict=True):
        kernels.write_text(changed, encoding="utf-8")
        done = python("-m", "tinyllama", "gate", "--against", "main", "--device", "cpu")
        assert f"exit status {done.returncode}" in output
        assert not missing(output, done.stdout), done.stdout
