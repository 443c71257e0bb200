"""What is drawn on the page: who has which colour and mark, and where each thing stands."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from correctness_tests.support.sample_records import (
    BANDWIDTH,
    PEAK,
    SHARES,
    ops,
    ratio,
    record,
    sample_records,
    step,
    steps,
    sweep,
)
from tinyllama.harness.page import NEEDS
from tinyllama.harness.records.entries import OpEntry, StepEntry, SweepEntry
from tinyllama.harness.records.results import Record, records
from tinyllama.ops import OPS

if not all(map(importlib.util.find_spec, NEEDS)):
    pytest.skip("needs the extra 'report'", allow_module_level=True)

from matplotlib.axes import Axes

from tinyllama.harness.page import ops as op_panels
from tinyllama.harness.page import panels, plots, roofline, sweeps, trend, view
from tinyllama.harness.page.charts import Chart, Scale
from tinyllama.harness.page.keys import FLOOR, Keys
from tinyllama.harness.page.panels import Context, Panel, Steps
from tinyllama.harness.page.svg import MARKS, NAMES, Key, Plot, colour, frame, to_svg

RESULTS = Path(__file__).parents[2] / "results"
KEY = Key("one", "series-0", "o")


def context(several: Sequence[Record]) -> Context:
    return Context(Keys(several), "d0")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every plot, as they are written."""
    kept: list[Axes] = []

    def keep(axes: Axes, *args: Any) -> str:
        kept.append(axes)
        return to_svg(axes, *args)

    for module in (plots, roofline):
        monkeypatch.setattr(module, "to_svg", keep)
    return kept


def points(axes: Axes) -> list[list[Any]]:
    """The points (x, y) of every line."""
    return [[(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in axes.lines]


# -- colours and marks ------------------------------------------------------------------------


def registered() -> list[OpEntry]:
    found = next(e for r in sample_records() for e in r.of(OpEntry))
    return [
        replace(found, op=op.name, provider=name) for op in OPS.values() for name in op.providers
    ]


def test_no_two_contenders_or_providers_look_alike() -> None:
    """All of the stored records, and every registered provider."""
    stored = [r for _, r in records(RESULTS)]
    assert len(stored) > 20
    keys = Keys([*stored, record("ops", registered())])
    looks = [(key.colour, key.shape, key.hollow) for key in keys.all.values()]
    assert len(looks) > 20
    assert len(set(looks)) == len(looks)
    tiers = {e.who for r in stored for e in r.of(StepEntry) if e.role == "tier"}
    for one in ("colour", "shape"):
        assert len({getattr(keys.all[name, False], one) for name in tiers}) == len(tiers)
    assert keys.all["triton", False].colour != keys.all["eager", False].colour


def test_names_look_alike_only_beyond_64_and_one_has_its_look_everywhere() -> None:
    first = step("small-bf16", "v3")
    many = [replace(first, contender=f"t{n:03}") for n in range(64)]
    keys = Keys([record("g", many)])
    assert len({(key.colour, key.shape) for key in keys.all.values()}) == 64
    several = sample_records()
    found = context(several)
    entries = [e for r in several for e in r.entries if isinstance(e, (StepEntry, SweepEntry))]
    assert {found.key(e) for e in entries if e.who == "v3"} == {found.keys.all["v3", False]}
    assert found.key(step("small-bf16", "floor")) == FLOOR
    peer = found.key(step("small-bf16", "liger"))
    assert peer.hollow
    assert peer == found.key(next(e for e in record("g", ops()).of(OpEntry) if e.who == "liger"))


# -- charts that are HTML ---------------------------------------------------------------------


def test_a_scale_is_logarithmic_and_its_ticks_are_round() -> None:
    scale = Scale(1.0, 100.0)
    assert [scale.at(x) for x in (1, 10, 100)] == pytest.approx([0, 50, 100])
    assert [text for _, text in scale.ticks()] == ["1", "2", "5", "10", "20", "50", "100"]
    assert [text for _, text in Scale(0.5, 900.0).ticks()] == ["1", "10", "100"]
    around = Scale.around([4.0, 30.0])
    assert (around.low, around.high) == pytest.approx((4 / 1.2, 36.0))


def chart(panel: Panel | None) -> Chart:
    assert panel is not None
    (found,) = [figure.plot for figure in panel.figures]
    assert isinstance(found, Chart)
    return found


def group(*entries: StepEntry) -> Steps:
    found = list(entries)
    return Steps(record("g", found), "small bf16", found)


def test_the_ladder_has_every_contender_of_every_group_where_its_time_is() -> None:
    groups = [group(*steps("small-bf16")), group(*steps("small-bf16", 10.0))]
    found = chart(panels.ladder(context(sample_records()), groups))
    times = [e.time * 1e3 for g in groups for e in g.found if e.ran]
    scale = Scale.around(times)
    dots = [dot for row in found.rows for dot in row.dots]
    assert [dot.at for dot in dots] == pytest.approx([scale.at(time) for time in times])
    assert all(0 < dot.at < 100 for dot in dots)
    assert {dot.tip.split()[0] for dot in dots if not dot.aside} == {"v1", "v2", "v3"}
    assert found.ticks == scale.ticks()
    assert found.unit == "ms / step, less is better"
    assert [row.figures for row in found.rows] == ["v3 0.970 ms", "v3 9.70 ms"]
    assert "v3 0.970 ms, 24.8× as fast as v1" in found.label


def test_the_parts_of_a_step_fill_it() -> None:
    first, split = panels.parts(context(sample_records()), [group(*steps("small-bf16"))])
    (row,) = chart(first).rows
    busy = 100 * (1 - 0.01)
    widths = [busy * share for share in SHARES.values()] + [1.0]
    assert [part.width for part in row.parts] == pytest.approx(widths)
    assert [part.colour for part in row.parts] == [f"part-{n}" for n in (*SHARES, "idle")]
    assert (row.name, row.figures) == ("small bf16", "v3 0.970 ms")
    assert chart(first).ticks == tuple((float(n), str(n)) for n in (0, 20, 40, 60, 80, 100))
    assert split.summary.startswith("v3 spends most on products: 41.6% of its step.")
    (table,) = split.tables
    assert table.rows[0].cells[0].text == "v1"
    assert [cell.note for cell in table.rows[2].cells[1:3]] == ["41.6%", "16.8%"]


def test_kernels_beside_each_other_make_a_bar_longer_and_the_scale_with_it() -> None:
    entry = step("small-bf16", "v3")
    beside = replace(entry, time_by={"products": 2 * entry.time, "gemm": 0.5 * entry.time})
    first, _ = panels.parts(context(sample_records()), [group(beside)])
    found = chart(first)
    (row,) = found.rows
    whole = 2.51  # with 1% idle
    assert [part.width for part in row.parts] == pytest.approx([200 / whole, 50 / whole, 1 / whole])
    assert [part.colour for part in row.parts] == ["part-products", "part-other", "part-idle"]
    assert [text for _, text in found.ticks] == ["0", "50", "100", "150", "200", "250"]
    assert [at for at, _ in found.ticks][:2] == pytest.approx([0, 50 / whole])
    assert first.figures[0].caption == "More than 100%: kernels ran beside each other."


# -- history ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "before", "seen"),
    [
        ((0.80, 0.78, 0.82), (0.75, 0.73, 0.77), trend.ROSE),
        ((0.70, 0.68, 0.72), (0.75, 0.73, 0.77), trend.FELL),
        ((0.78, 0.76, 0.80), (0.75, 0.73, 0.77), trend.NONE),
        ((0.72, 0.70, 0.74), (0.75, 0.73, 0.77), trend.NONE),
    ],
)
def test_the_last_run_stands_beside_the_one_before(
    last: tuple[float, float, float], before: tuple[float, float, float], seen: str
) -> None:
    shares = [(9.0, 8.0, 10.0), before, last]
    runs = [
        record("small-bf16", [step("small-bf16", "v3", n, floor_share=type(ratio(1))(*share))])
        for n, share in enumerate(shares, 1)
    ]
    runs[-1].versions = {"torch": "9"}
    panel = trend.against(context(runs), {("small", "bf16"): runs})
    assert panel is not None
    (table,) = panel.tables
    assert table.folded == (seen == trend.NONE)
    texts = [cell.text for cell in table.rows[0].cells]
    assert texts[:3] == ["v3", "2.91", "1.94"]
    assert [float(text) for text in texts[3:5]] == [100 * last[0], 100 * before[0]]
    assert texts[5] == seen
    assert "torch 2.11.0 → 9" in texts[6]
    assert trend.against(context(runs), {("small", "bf16"): runs[:1]}) is None


# -- plots of matplotlib ----------------------------------------------------------------------


def texts(plot: Plot) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg)


def test_lines_say_what_is_on_both_axes(drawn: list[Axes]) -> None:
    line = plots.Line(KEY, ((1.0, 3.0), (4.0, 50.0)), hollow=frozenset({1}))
    plot = plots.lines([line], "sequence length", "time, ms / step", "i", "a label")
    assert {"sequence length", "time, ms / step"} <= set(texts(plot))
    assert plot.keys == (KEY,)
    assert points(drawn[0]) == [[(1, 3), (4, 50)], [(1, 3)], [(4, 50)]]
    faces = [line.get_markerfacecolor() for line in drawn[0].lines[1:]]
    assert faces == [colour("series-0"), colour("card")]
    assert {"1", "4", "5", "10", "20", "50"} <= set(texts(plot))
    assert (drawn[0].get_xscale(), drawn[0].get_yscale()) == ("log", "log")


def test_lines_over_names_have_a_mark_where_the_versions_changed(drawn: list[Axes]) -> None:
    line = plots.Line(KEY, ((0, 3.0), (1, 4.0)))
    plot = plots.lines([line], "run", "ms", "i", "l", ["2026-01-05", "2026-02-10"], [0.5])
    assert {"2026-01-05", "2026-02-10"} <= set(texts(plot))
    assert points(drawn[0])[0] == [(0.5, 0.0), (0.5, 1.0)]
    assert drawn[0].get_xscale() == "linear"


def test_the_roofline_has_its_ceilings_and_every_op_beneath(drawn: list[Axes]) -> None:
    marks = [
        roofline.Mark("a", KEY, 2.0, 5e12, "low"),
        roofline.Mark("a", KEY, 2.0, 1e12, "lower"),
        roofline.Mark("b", KEY, 400.0, 6e14, "high"),
    ]
    plot = roofline.roofline(marks, BANDWIDTH, [PEAK, PEAK / 10], "i", "a label")
    assert {"a", "b"} <= set(texts(plot))
    (axes,) = drawn
    assert (axes.get_xlabel(), axes.texts[-1].get_text()) == ("FLOP / byte", "FLOP / s")
    assert axes.get_xlim() == pytest.approx((1.0, 1000.0))
    assert axes.get_ylim() == pytest.approx((5e11, 1.8 * PEAK))
    slope, top, low, first, second, *dots = points(axes)
    ridge = PEAK / BANDWIDTH
    assert slope == [pytest.approx((1.0, BANDWIDTH)), pytest.approx((ridge, PEAK))]
    assert top == [pytest.approx((ridge, PEAK)), pytest.approx((1000, PEAK))]
    assert low == [pytest.approx((ridge / 10, PEAK / 10)), pytest.approx((1000, PEAK / 10))]
    assert first[1:] == [(2.0, 5e12), (2.0, 1e12)]
    assert second[1:] == [(400.0, 6e14), (400.0, 6e14)]
    assert dots == [[(mark.x, mark.y)] for mark in marks]
    assert all(mark.tip in plot.svg for mark in marks)


@pytest.mark.parametrize(
    ("bandwidth", "peaks", "ends"),
    [
        (None, [PEAK], [[(1.0, PEAK), (5.0, PEAK)]]),
        (BANDWIDTH, [], [[(1.0, BANDWIDTH), (5.0, 5 * BANDWIDTH)]]),
        (BANDWIDTH, [PEAK], [[(1.0, BANDWIDTH), (5.0, 5 * BANDWIDTH)]]),
    ],
    ids=["no bandwidth", "no peaks", "a peak beyond the ops"],
)
def test_a_ceiling_that_is_unknown_or_far_away_is_not_drawn(
    bandwidth: float | None, peaks: list[float], ends: Any, drawn: list[Axes]
) -> None:
    roofline.roofline([roofline.Mark("a", KEY, 2.0, 1e12, "t")], bandwidth, peaks, "i", "l")
    assert drawn[0].get_xlim() == pytest.approx((1.0, 5.0))
    found = points(drawn[0])[:-2]
    assert [[pytest.approx(end) for end in line] for line in ends] == found


def test_letters_keep_their_order_their_distance_and_the_room() -> None:
    assert roofline.spread([10.0, 50.0], 100.0) == [10.0, 50.0]
    assert roofline.spread([50.0, 50.0], 100.0) == pytest.approx([43.5, 56.5])
    assert roofline.spread([99.0, 100.0], 100.0) == pytest.approx([87.0, 100.0])
    assert roofline.spread([0.0, 0.0], 100.0) == pytest.approx([0.0, 13.0])


def test_a_drawing_has_the_page_s_colours_and_no_text_of_its_tips_is_markup() -> None:
    assert len({colour(name) for name in NAMES}) == len(NAMES)
    axes = frame(100, 10, 10, 10, 10)
    plots.marker(axes, 1, 2, KEY, gid="one")
    svg = to_svg(axes, "i", 'a "label" <b>', {"one": "<i>tip</i>"})
    assert svg.startswith(
        '<svg viewBox="0 0 312 100" role="img" aria-label="a &quot;label&quot; &lt;b'
    )
    assert "<title>&lt;i&gt;tip&lt;/i&gt;</title>" in svg
    assert "<title>a &quot;label&quot; &lt;b&gt;</title>" in svg
    assert "<b>" not in svg
    assert "var(--series-0)" in svg
    assert not re.findall(r"#5e..a7|<style|<metadata|<!--|xlink| id=\"one\"|\d\.\d{3,}\"", svg)
    assert len(MARKS) == len({Key("", "", mark).path for mark in MARKS})


# -- sweeps and ops ---------------------------------------------------------------------------


def test_what_most_points_of_an_axis_have_is_held_along_it() -> None:
    point = next(e for e in sweep("small-bf16") if e.axis == "seq_len")
    sizes = [(4, 128, "seq_len"), (8, 128, "seq_len"), (8, 256, "seq_len"), (8, 512, "batch_size")]
    found = [replace(point, batch_size=b, seq_len=t, axis=axis) for b, t, axis in sizes]
    along, held = sweeps.along(found, "seq_len")
    assert (held, along) == (8, found[1:])
    assert sweeps.along(found[:3], "batch_size") == ([], 0)


def test_a_sweep_is_drawn_along_each_axis_in_its_units(drawn: list[Axes]) -> None:
    found = record("sweep-small-bf16", sweep("small-bf16"))
    panel = sweeps.panel(context([found]), found, ("small", "bf16"), "i")
    labels = [axes.get_xlabel() for axes in drawn]
    assert labels == ["sequence length"] * 2 + ["batch"] * 2
    named = [text for figure in panel.figures for text in texts(figure.plot)]  # type: ignore[arg-type]
    assert (named.count("time, ms / step"), named.count("peak memory, MiB")) == (2, 2)
    points_of = {(e.seq_len, e.batch_size): e for e in found.of(SweepEntry) if e.who == "v3"}
    v3 = next(n for n, key in enumerate(panel.figures[0].plot.keys) if key.label == "v3")
    line = [each for each in points(drawn[0]) if len(each) > 1][v3]
    assert line == [
        (length, pytest.approx(1e3 * entry.time))
        for (length, batch), entry in sorted(points_of.items())
        if batch == 8
    ]
    line = [each for each in points(drawn[3]) if len(each) > 1][v3]
    assert line == [
        (batch, pytest.approx((points_of[256, batch].peak_bytes or 0) / 2**20))
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    assert panel.figures[0].caption.startswith(
        "Time against sequence length, batch 8. At T = 8,192"
    )
    assert "ms." in panel.figures[0].caption
    assert panel.figures[1].caption.startswith("Peak memory against sequence length, batch 8.")
    assert "MiB." in panel.figures[1].caption
    assert panel.figures[2].caption.startswith(
        "Time against batch, sequence length 256. At B = 128"
    )
    assert "v1 ends at 4,096." in panel.figures[0].caption
    assert panel.notes == ("v1 cannot run B = 8, T = 8,192: SYNTHETIC: out of memory",)
    by_length, by_batch = panel.aside
    assert [row.cells[0].text for row in by_length.rows][-1] == "8,192"
    assert by_length.rows[-1].cells[1].text == "cannot"
    entry = points_of[256, 8]
    cells = by_batch.rows[3].cells
    column = [header.name for header in by_batch.headers].index("v3")
    assert cells[0].text == "8"
    assert float(cells[column].text) == pytest.approx(1e3 * entry.time, rel=5e-3)
    assert float(cells[column].note) == pytest.approx((entry.peak_bytes or 0) / 2**20, rel=5e-3)


def test_an_op_is_drawn_with_its_largest_case_at_its_intensity(drawn: list[Axes]) -> None:
    found = record("ops-bf16", ops())
    panel = op_panels.panel(context([found]), found, "bf16", "i")
    largest = [e for e in found.of(OpEntry) if e.passes == "forward" and "B=8," in e.case]
    dots = [each[0] for each in points(drawn[0]) if len(each) == 1]
    assert len(dots) == len(largest)
    expected = [((e.flops or 0) / (e.bytes or 1), (e.flops or 0) / e.time) for e in largest]
    assert sorted(dots) == [pytest.approx(each) for each in sorted(expected)]
    slope, peak = points(drawn[0])[:2]
    assert slope[1][1] == pytest.approx(PEAK)
    assert peak[1][1] == pytest.approx(PEAK)
    (key,) = panel.aside
    best = max(
        (e for e in largest if e.op == "rope" and e.role == "ours"),
        key=lambda e: e.roofline_share or 0,
    )
    (row,) = [row for row in key.rows if row.cells[0].text.endswith(" rope")]
    column = [(h.name, h.unit) for h in key.headers].index(("fwd", "ours, %"))
    cell = row.cells[column]
    assert (cell.note, cell.share) == (best.provider, best.roofline_share)
    assert float(cell.text) == pytest.approx(100 * (best.roofline_share or 0), rel=5e-3)
    (full,) = panel.tables
    assert len(full.rows) == len(found.of(OpEntry))
    assert panel.notes[1] == (
        "Ceilings, measured in the same run: copy 4.10 TB/s; products, bf16 720 TFLOP/s."
    )


def test_a_time_of_zero_is_no_figure() -> None:
    found = [replace(step("small-bf16", "v3"), seconds=0.0), step("small-bf16", "v1")]
    page = view.page([record("small-bf16", found)], [], "t")
    assert page.devices[0].sections[1].panels
