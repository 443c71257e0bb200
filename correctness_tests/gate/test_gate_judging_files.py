"""Which files judge, by their names: a change of one is told."""

from pathlib import Path

import pytest

from tinyllama.harness.gate import judged

HARNESS = "tinyllama/harness"
JUDGING = (
    *(f"{HARNESS}/{folder}/x.py" for folder in ("correct", "gate", "measure", "records")),
    *(f"{HARNESS}/machine/{name}.py" for name in ("worker", "wire", "parsed")),
    *(f"{folder}/a/b.yml" for folder in (f"{HARNESS}/plugins", "tinyllama/suites")),
    *(".github/workflows/ci.yml", ".ci/run"),
    *("conftest.py", "tests/conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini"),
    *(".pytest.ini", "tox.ini", "setup.cfg", "a/setup.cfg", "a/b.pyc"),
)
OTHER = (
    *(f"{HARNESS}/{name}.py" for name in ("machine/device", "kernels/launch", "correctly")),
    *("tinyllama/ops/rope.py", "tinyllama/suites.py", "README.md", "a/my_conftest.py", "a.py"),
)


@pytest.mark.parametrize("name", [*JUDGING, *OTHER])
def test_what_judges_is_known_by_its_name(name: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")
    for base, candidate in (({}, {name: one}), ({name: one}, {}), ({name: one}, {name: other})):
        found = judged.changed_files(base, candidate)
        assert [change.name for change in found] == ([name] if name in JUDGING else [])
    assert judged.changed_files({name: one}, {name: one}) == []
    assert [c.name for c in judged.changed_files({name: one}, {name: other}, [name])] == [name]


def test_a_number_and_its_text_are_not_the_same_declaration() -> None:
    values = (1, "1", [1], ["1"], "[1]", {1: 2}, {"1": 2}, {1: "2"})
    assert len({judged._plain(value) for value in values}) == len(values)
