"""Figures without noise, exactly: counts, times of compiling, layouts, and what is new."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinyllama.harness.gate.exact import (
    COMPILE_RATIO,
    COMPILE_SECONDS,
    COUNTED_ON_GPU,
    compile_figure,
    count_figures,
    layout_figures,
    layouts_missed,
    new_figures,
)
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.verdict import Figure, Outcome

SAME, SLOWER, FASTER, MISSING = Outcome.SAME, Outcome.SLOWER, Outcome.FASTER, Outcome.MISSING


def figure(before: Any, after: Any, share: float = 0.0, more: int = 0) -> Figure:
    (found,) = count_figures({"bytes": before}, {"bytes": after}, lambda metric: (share, more))
    assert (found.metric, found.before, found.after) == ("bytes", before, after)
    return found


@pytest.mark.parametrize(
    ("before", "after", "share", "more", "outcome", "text"),
    [
        (1000, 1000, 0.0, 0, SAME, "bytes 1,000 -> 1,000"),
        (1000, 1001, 0.0, 0, SLOWER, "bytes 1,000 -> 1,001"),
        (1000, 999, 0.0, 0, FASTER, "bytes 1,000 -> 999"),
        (1000, 1250, 0.25, 0, SAME, "bytes 1,000 -> 1,250, 25.0% accepted"),
        (1000, 1251, 0.25, 0, SLOWER, "bytes 1,000 -> 1,251, 25.0% accepted"),
        (1000, 1000, 0.25, 0, SAME, "bytes 1,000 -> 1,000"),
        (1000, 999, 0.25, 0, FASTER, "bytes 1,000 -> 999"),
        (1000, 3000, 0.0, 2000, SAME, "bytes 1,000 -> 3,000, 2,000 more accepted"),
        (1000, 3001, 0.0, 2000, SLOWER, "bytes 1,000 -> 3,001, 2,000 more accepted"),
        (1000, 1256, 0.25, 6, SAME, "bytes 1,000 -> 1,256, 25.0% accepted"),
        (1000, 1257, 0.25, 6, SLOWER, "bytes 1,000 -> 1,257, 25.0% accepted"),
        (0, 0, 0.0, 0, SAME, "bytes 0 -> 0"),
        (0, 1, 0.0, 0, SLOWER, "bytes 0 -> 1"),
        *(
            (*each, 0.0, 0, MISSING, f"bytes was {each[0]}, is {each[1]}: it was not read on both")
            for bad in (None, -1, 1.0, True, "3")
            for each in ((bad, 5), (5, bad))
        ),
    ],
)
def test_a_count_is_held_to_the_bases_and_what_is_accepted(
    before: Any, after: Any, share: float, more: int, outcome: Outcome, text: str
) -> None:
    found = figure(before, after, share, more)
    assert found.outcome is outcome
    assert found.text == text + (" sides" if outcome is MISSING else "")
    known = outcome is not MISSING and before
    assert found.ratio == (after / before if known else None)


def nothing(metric: str) -> tuple[float, int]:
    return 0.0, 0


def test_each_metric_is_held_to_what_is_accepted_of_it() -> None:
    accepted = {"a": (0.5, 0), "b": (0.0, 3), "c": (0.0, 0)}
    side, other = {"a": 10, "b": 10, "c": 10}, {"a": 15, "b": 13, "c": 11}
    found = count_figures(side, other, accepted.__getitem__)
    assert [(one.metric, one.outcome) for one in found] == [("a", SAME), ("b", SAME), ("c", SLOWER)]


def test_what_is_wanted_or_read_on_one_side_has_a_figure() -> None:
    found = count_figures({"a": 1}, {"b": 2}, nothing, ["c"])
    assert [one.metric for one in found] == ["c", "a", "b"]
    assert {one.outcome for one in found} == {MISSING}


@pytest.mark.parametrize("side", [BASE, CANDIDATE])
@pytest.mark.parametrize("seen", [{"kernels": 1, "copies": 0}, {"kernels": 0, "copies": 1}])
def test_a_side_without_launches_and_copies_was_not_profiled(
    side: str, seen: dict[str, int]
) -> None:
    profiled = {"peak_bytes": 5, "host_syncs": 0, **seen}
    blind = {**profiled, "kernels": 0, "copies": 0}
    both = count_figures(profiled, profiled, nothing, COUNTED_ON_GPU)
    assert [one.metric for one in both] == ["peak_bytes", "kernels", "copies", "host_syncs"]
    assert {one.outcome for one in both} == {SAME}
    sides = (blind, profiled) if side == BASE else (profiled, blind)
    found = {one.metric: one for one in count_figures(*sides, nothing, COUNTED_ON_GPU)}
    text = "the profiler saw no launch and no copy of a side: may this device be profiled?"
    assert found["kernels"] == Figure("kernels", MISSING, text)
    assert found["peak_bytes"].outcome is SAME
    assert [*found] == [*COUNTED_ON_GPU]
    asked = count_figures(*sides, nothing, ["peak_bytes"])
    assert all(one.text != text for one in asked), "where no launches are wanted"


def test_a_layout_is_held_to_its_bar_and_what_is_accepted() -> None:
    bars = {"at": 1.5, "above": 1.5, "absent": 2.0}
    ratios = {"at": Ratio(1.7, 1.65, 1.9), "above": Ratio(1.7, 1.651, 1.9)}
    at, above, absent = layout_figures(ratios, bars, 0.1)
    assert (at.metric, at.outcome, at.after) == ("layouts at", SAME, 1.7)
    assert above.outcome is SLOWER
    times = "times as long as contiguous, allowed 1.65"
    assert above.text == f"layouts above {ratios['above']} {times}"
    assert absent == Figure("layouts absent", MISSING, "layouts absent: not measured")
    (strict, _, _) = layout_figures(ratios, bars, 0.0)
    assert strict.outcome is SLOWER
    assert layouts_missed(ratios, bars, 0.1) == ("above",)
    assert layouts_missed(ratios, dict(reversed(bars.items())), 0.0) == ("above", "at")
    exactly = {"at": Ratio(1.5, 1.5, 1.5)}
    assert layouts_missed(exactly, bars, 0.0) == ()
    assert layout_figures(exactly, {"at": 1.5}, 0.0)[0].outcome is SAME


def test_what_is_new_is_shown_and_decides_nothing() -> None:
    seconds, count = new_figures({"device_seconds": 1.25e-4}, {"peak_bytes": 123456})
    new = Outcome.NEW
    text = "device_seconds 125.0 us"
    assert seconds == Figure("device_seconds", new, text, after=1.25e-4)
    assert count == Figure("peak_bytes", new, "peak_bytes 123,456", after=123456)


@pytest.mark.parametrize("accepted", [0.0, 0.5])
def test_the_time_to_compile_has_a_ratio_and_some_seconds(accepted: float) -> None:
    limit = 4.0 * COMPILE_RATIO * (1 + accepted) + COMPILE_SECONDS

    def found(after: Any, before: Any = 4.0) -> Figure:
        return compile_figure(
            {BASE: before, CANDIDATE: after}, {"compile_seconds": accepted}.__getitem__
        )

    assert found(limit).outcome is SAME
    assert found(limit).text == f"compile_seconds 4.0 -> {limit:.1f}"
    over = found(limit + 0.1)
    assert over.outcome is SLOWER
    assert over.text == f"compile_seconds 4.0 -> {limit + 0.1:.1f}, allowed {limit:.1f}"
    assert (over.metric, over.before, over.after) == ("compile_seconds", 4.0, limit + 0.1)
    assert over.ratio == (limit + 0.1) / 4.0
    for bad in (None, 0.0, -1.0, math.nan):
        assert found(bad).outcome is MISSING
        wrong = found(1.0, bad)
        assert wrong.text == f"compile_seconds was {bad}, is 1.0: invalid times"
