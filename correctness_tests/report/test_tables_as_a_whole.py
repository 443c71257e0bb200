"""Tables of SYNTHETIC records are those that are recorded, to the last digit.

A wanted change is recorded by ``python -m correctness_tests.support.told_tables``, and read in the
difference of tables.txt.
"""

import difflib
import io
import sys

import pytest

from correctness_tests.support.told_tables import FILE, told
from tinyllama.harness.records.report import console


def test_tables_are_as_recorded() -> None:
    recorded = FILE.read_text(encoding="utf-8").splitlines()
    assert list(difflib.unified_diff(recorded, told().splitlines(), "recorded", "now", n=0)) == []


def test_a_pipe_has_120_columns_and_a_terminal_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "77")
    pipe = io.StringIO()
    assert (console(pipe).width, console(pipe).file) == (120, pipe)
    assert console(Terminal()).width == 77
    monkeypatch.setattr(sys, "stdout", pipe)
    console().print("[b] text :smile:", "x" * 200)
    assert [line.rstrip() for line in pipe.getvalue().splitlines()] == [
        "[b] text :smile:",
        "x" * 120,
        "x" * 80,
    ]
