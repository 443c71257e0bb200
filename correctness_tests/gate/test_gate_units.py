"""Which functions of a file differ: names and lines, and when more than their bodies does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyllama.harness.gate.units import Changed, changed

BASE = """import math

SIZE = 3


def first(x, y=1):
    return x + y


@cached
@other(
    3
)
def second(x):
    def inner(z):
        return z

    return inner(x)


class Thing:
    size = 1

    def one(self):
        return 1

    class Part:
        async def two(self):
            return 2


def last():
    return 0
"""


def found(tmp_path: Path, *changes: tuple[str, str]) -> Changed | None:
    text = BASE
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    base, candidate = tmp_path / "base.py", tmp_path / "candidate.py"
    base.write_text(BASE)
    candidate.write_text(text)
    return changed(base, candidate)


def test_functions_whose_bodies_differ_are_named_with_their_lines(tmp_path: Path) -> None:
    assert found(tmp_path) == Changed((), (), ())
    one = found(tmp_path, ("return x + y", "z = x\n    return z + y"))
    assert one == Changed(("first",), (range(6, 8),), (range(6, 9),))
    inner = found(tmp_path, ("return z", "return -z"))
    assert inner == Changed(("second",), (range(10, 19),), (range(10, 19),))
    both = found(tmp_path, ("return 1", "return 9"), ("return 2", "return 8"))
    assert both is not None
    assert both.names == ("Thing.one", "Thing.Part.two")
    assert both.base == (range(24, 26), range(28, 30))
    ends = found(tmp_path, ("return x + y", "return y + x"), ("return 0", "return 1"))
    lines = (range(6, 8), range(32, 34))
    assert ends == Changed(("first", "last"), lines, lines)


@pytest.mark.parametrize(
    "change",
    [
        ("SIZE = 3", "SIZE = 4"),
        ("import math", "import cmath"),
        ("y=1", "y=2"),
        ("@cached", "@kept"),
        ("size = 1", "size = 2"),
        ("class Part:", "class Part(Base):"),
        ("def last():", "def newest():"),
        ("def last():\n    return 0\n", ""),
        ("SIZE = 3", "SIZE = 3\n\n\ndef more():\n    pass"),
        ("return 0", "return ("),
    ],
    ids=str,
)
def test_where_more_differs_nothing_is_named(tmp_path: Path, change: tuple[str, str]) -> None:
    assert found(tmp_path, change) is None
    assert found(tmp_path, ("return x + y", "return y + x"), change) is None


def test_comments_and_empty_lines_are_no_difference(tmp_path: Path) -> None:
    assert found(tmp_path, ("return 0", "return 0  # nothing")) == Changed((), (), ())
    moved = found(tmp_path, ("SIZE = 3", "SIZE = 3  # few\n\n\n"))
    assert moved == Changed((), (), ())
