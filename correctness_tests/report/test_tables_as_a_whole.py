"""Tables of SYNTHETIC records are those that are recorded, to the last digit.

A wanted change is recorded by ``python -m correctness_tests.support.told_tables``, and read in the
difference of tables.txt.
"""

import difflib
import io
import itertools
import sys
from dataclasses import replace

import pytest

from correctness_tests.support.sample_records import step
from correctness_tests.support.told_tables import FILE, told
from tinyllama.harness.records import report
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


def test_steps_are_sorted_by_the_fastest_tier_of_their_workload() -> None:
    """Of a workload, its slowest precision first; what a peer takes counts for neither."""
    one = step("small-bf16", "v1")
    places: list[tuple[str, str, str, float]] = [
        ("short", "fp32", "tier", 3.0),
        ("short", "bf16", "tier", 2.0),
        ("long", "fp32", "tier", 9.0),
        ("long", "bf16", "tier", 4.0),
        ("long", "bf16", "peer", 1.0),
    ]
    for order in itertools.permutations(places):
        found = report._by_size(
            [
                replace(one, workload=w, precision=p, role=role, seconds=seconds)
                for w, p, role, seconds in order
            ]
        )
        groups = list(dict.fromkeys((entry.workload, entry.precision) for entry in found))
        assert groups == [(w, p) for w, p, *_ in places[:4]], order
