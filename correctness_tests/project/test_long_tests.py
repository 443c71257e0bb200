"""`make test` leaves out the functions of long.txt and counts them; each of them exists."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from correctness_tests import conftest
from correctness_tests.support.commands import ROOT
from tinyllama.harness.plugins.suite import LEFT_OUT


def test_each_listed_function_exists() -> None:
    """Else run python -m tools.long_tests, or rename the line."""
    for name in conftest.LONG.read_text().split():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), name


@pytest.mark.parametrize(("expression", "counted"), [("not long", 2), ("", 0), ("long", 0)])
def test_those_are_marked_and_counted_where_they_are_left_out(
    expression: str, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("a.py::test_a\na.py::test_b\n")
    monkeypatch.setattr(conftest, "LONG", tmp_path / "long.txt")
    given: list[Any] = []
    for name in ("a.py::test_a[a-b[c]]", "a.py::test_b", "a.py::test_c"):
        marks: list[str] = []
        given.append(SimpleNamespace(nodeid=name, add_marker=marks.append, marks=marks))
    option = SimpleNamespace(markexpr=expression)
    config: Any = SimpleNamespace(option=option, stash={LEFT_OUT: Counter()})
    conftest.pytest_collection_modifyitems(config, given)
    assert [item.marks for item in given] == [["long"], ["long"], []]
    assert sum(config.stash[LEFT_OUT].values()) == counted
