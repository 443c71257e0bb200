"""``[tool.tinyllama]`` of pyproject.toml: what a repository sets counts, and what is wrong is
refused by the name of its key."""

from pathlib import Path

import pytest

from tinyllama.harness.gate import config


def write(text: str, folder: Path = Path()) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.other]\nx = 1\n[tool.tinyllama]\n{text}\n")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("group = ['one']", "group"),
        ("ops = ['a.py', 'a.py']", "ops"),
        ("ops = [1]", "ops"),
        ("slowdowns = { seconds = 0.1 }", "slowdowns"),
        ("slowdowns = { device_seconds = 5 }", "slowdowns"),
        ("ops = ['']", "ops"),
        ("unrelated = '*.md'", "unrelated"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_its_key(tmp_path: Path, text: str, key: str) -> None:
    write(text, tmp_path)
    with pytest.raises(ValueError, match=rf"pyproject\.toml.*{key}"):
        config.load(tmp_path)


def test_a_base_of_another_version_may_have_other_keys(tmp_path: Path) -> None:
    write("old = 1\nops = ['a.py']", tmp_path)
    assert config.load(tmp_path, of_base=True).ops == ("a.py",)


@pytest.mark.parametrize(
    ("base", "candidate", "file"),
    [
        ("torch==2.7", "torch==2.8", "constraints.txt"),
        ("torch==2.7", "torch==2.8", "requirements/gpu.txt"),
        ("a", "b", "uv.lock"),
        ('[project]\ndependencies = ["torch"]', "[project]\n", "pyproject.toml"),
        ("[build-system]\nrequires = ['a']", "", "pyproject.toml"),
        ("[tool.poetry.dependencies]\ntorch = '2.7'", "", "pyproject.toml"),
    ],
)
def test_other_dependencies_are_seen(tmp_path: Path, base: str, candidate: str, file: str) -> None:
    trees = tmp_path / "base", tmp_path / "candidate"
    for tree, text in zip(trees, (base, candidate), strict=True):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text)
    assert config.dependencies_changed(*trees, [file, "op.py"]) == [file]
    assert config.dependencies_changed(trees[0], trees[0], ["pyproject.toml"]) == []
