"""What matplotlib draws on the page, and the tables beside it: places, units, axes, ceilings."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from correctness_tests.support.sample_records import (
    BANDWIDTH,
    PEAK,
    ops,
    ratio,
    record,
    sample_records,
    step,
    sweep,
)
from tinyllama.harness.page import NEEDS
from tinyllama.harness.records.entries import OpEntry, StepEntry, SweepEntry
from tinyllama.harness.records.numbers import mebibytes, milliseconds, percent, tick
from tinyllama.harness.records.results import Record

if not all(map(importlib.util.find_spec, NEEDS)):
    pytest.skip("needs the extra 'report'", allow_module_level=True)

from matplotlib.axes import Axes

from tinyllama.harness.page import columns, plots, roofline, sweeps, trend, view
from tinyllama.harness.page import ops as op_panels
from tinyllama.harness.page.keys import Keys
from tinyllama.harness.page.panels import Context
from tinyllama.harness.page.svg import WIDTH, Key, Plot, colour, frame, to_svg
from tinyllama.harness.page.tables import table

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
    assert drawn[0].get_xlim() == pytest.approx((1 / 1.15, 4 * 1.15))


def test_a_wide_axis_names_its_decades_alone_and_a_narrow_one_has_a_whole_one() -> None:
    wide = plots.lines([plots.Line(KEY, ((0, 1e-3), (1, 4.0)))], "x", "y", "i", "l", ["a", "b"])
    assert {"0.001", "0.01", "0.1", "1"} <= set(texts(wide))
    assert not {"0.002", "0.5", "2"} & set(texts(wide))
    narrow = plots.lines([plots.Line(KEY, ((0, 3.0), (1, 3.1)))], "x", "y", "i", "l", ["a", "b"])
    assert {"1", "2", "5"} <= set(texts(narrow)), "a decade around 3"


def test_lines_over_names_have_a_mark_where_the_versions_changed(drawn: list[Axes]) -> None:
    line = plots.Line(KEY, ((0, 3.0), (1, 4.0)))
    plot = plots.lines([line], "run", "ms", "i", "l", ["2026-01-05", "2026-02-10"], [0.5])
    assert {"2026-01-05", "2026-02-10"} <= set(texts(plot))
    assert points(drawn[0])[0] == [(0.5, 0.0), (0.5, 1.0)]
    assert drawn[0].get_xscale() == "linear"
    assert drawn[0].get_xlim() == pytest.approx((-0.25, 1.25))


def test_history_is_drawn_from_the_first_run_to_the_last(drawn: list[Axes]) -> None:
    """Of three runs, the last with other versions: a line is before it, its marks are hollow."""
    runs = [r for r in sample_records()[:9] if r.group == "small-bf16"]
    panel = trend.panel(context(runs), runs, ("small", "bf16"), "i")
    assert panel is not None
    mark, *lines = points(drawn[0])
    assert [x for x, _ in mark] == [1.5, 1.5]
    whole = [line for line in lines if len(line) == 3]
    assert whole[2] == [(n, pytest.approx(0.97 * scale)) for n, scale in enumerate((1.3, 1.12, 1))]
    hollow = [line.get_markerfacecolor() == colour("card") for line in drawn[0].lines[1:5]]
    assert hollow == [False, False, False, True]  # the line of V1, and its three marks
    assert panel.notes == (
        "2026-03-02, other versions: torch 2.10.0 → 2.11.0, triton 3.5.1 → 3.6.0",
    )


def test_each_tier_of_a_run_has_its_line_in_the_history(drawn: list[Axes]) -> None:
    tiers = [step("small-bf16", name) for name in ("v1", "v2", "v3")]
    runs = [record("small-bf16", tiers, date=f"2026-01-0{day}T09:00:00Z") for day in (1, 2)]
    assert trend.panel(context(runs), runs, ("small", "bf16"), "i") is not None
    assert sum(len(line) == 2 for line in points(drawn[0])) == 3


def test_names_that_have_no_room_are_left_out_but_not_the_last() -> None:
    days = [f"2026-01-{day:02}" for day in range(1, 13)]
    line = plots.Line(KEY, tuple((n, 1.0) for n in range(12)))
    named = [text for text in texts(plots.lines([line], "x", "y", "i", "l", days)) if text in days]
    assert 2 <= len(named) <= 4
    assert "2026-01-12" in named


def test_no_number_stands_at_a_mark_between_those_that_are_named(drawn: list[Axes]) -> None:
    """matplotlib names them where less than a decade is drawn."""
    plots.lines([plots.Line(KEY, ((1, 3.0), (2, 4.0), (3, 5.0)))], "x", "y", "i", "l")
    roofline.roofline([roofline.Mark("a", KEY, 2.0, 1e12, "t")], None, [], "i", "l")
    for axes in drawn:
        for axis in (axes.xaxis, axes.yaxis):
            found = axis.get_minor_formatter()
            assert [found(value, 0) for value in (2.0, 3.0, 4e12)] == [""] * 3
    assert list(drawn[0].xaxis.get_minor_locator()()) == [1, 2, 3]


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
    for axis in (axes.xaxis, axes.yaxis):  # a mark at each power of ten, and at nothing else
        marks_at = np.log10([*axis.get_majorticklocs(), *axis.get_minorticklocs()])
        assert marks_at == pytest.approx(np.round(marks_at))
    assert axes.yaxis.get_major_formatter()(1e12) == roofline.tick(1e12)
    slope, top, low, first, second, *dots = points(axes)
    ridge = PEAK / BANDWIDTH
    assert slope == [pytest.approx((1.0, BANDWIDTH)), pytest.approx((ridge, PEAK))]
    assert top == [pytest.approx((ridge, PEAK)), pytest.approx((1000, PEAK))]
    assert low == [pytest.approx((ridge / 10, PEAK / 10)), pytest.approx((1000, PEAK / 10))]
    assert first[0] == pytest.approx((2.0, 1.02 * 1.8 * PEAK)), "there is room above the op"
    assert first[1:] == [(2.0, 5e12), (2.0, 1e12)]
    assert second[1:] == [(400.0, 6e14), (400.0, 6e14)]
    assert dots == [[(mark.x, mark.y)] for mark in marks]
    for text, line in zip(axes.texts, (first, second), strict=False):
        assert text.xy == pytest.approx((line[0][0], 1.8 * PEAK))  # type: ignore[attr-defined]
        assert text.xyann == (0, 3), "points above it"  # type: ignore[attr-defined]
        assert text.get_horizontalalignment() == "center"
    assert (axes.texts[-1].xy, axes.texts[-1].xyann) == ((0, 1), (2, -12))  # type: ignore[attr-defined]
    assert axes.xaxis.labelpad == 3
    assert all(mark.tip in plot.svg for mark in marks)


def test_without_ceilings_the_ops_alone_have_room(drawn: list[Axes]) -> None:
    marks = [roofline.Mark("a", KEY, 2.0, 1e12, "t"), roofline.Mark("b", KEY, 3.0, 9e12, "t")]
    for order in (marks, marks[::-1]):
        roofline.roofline(order, None, [], "i", "l")
        assert drawn[-1].get_ylim() == pytest.approx((5e11, 1.8 * 9e12))


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


def test_letters_of_near_ops_are_moved_apart(drawn: list[Axes]) -> None:
    marks = [roofline.Mark(name, KEY, x, 1e12, "t") for name, x in (("a", 8), ("b", 9), ("c", 400))]
    roofline.roofline(marks, BANDWIDTH, [], "i", "l")
    (axes,) = drawn
    letters = [line[0] for line in points(axes)[1:4]]
    places = axes.transData.transform(letters)[:, 0] * 72 / axes.figure.dpi
    assert places[1] - places[0] == pytest.approx(roofline.GAP)
    assert letters[0][0] < 8 < 9 < letters[1][0]
    assert letters[2][0] == pytest.approx(400)


def test_letters_keep_their_order_their_distance_and_the_room() -> None:
    assert roofline.spread([10.0, 50.0], 100.0) == [10.0, 50.0]
    assert roofline.spread([50.0, 50.0], 100.0) == pytest.approx([43.5, 56.5])
    assert roofline.spread([99.0, 100.0], 100.0) == pytest.approx([87.0, 100.0])
    assert roofline.spread([0.0, 0.0], 100.0) == pytest.approx([0.0, 13.0])


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
    far = points_of[8192, 8]
    assert f"v3 {milliseconds(far.time)}" in panel.figures[0].caption
    assert f"v3 {mebibytes(far.peak_bytes or 0)}" in panel.figures[1].caption
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


def placed(*sizes: tuple[int, int], **fields: Any) -> list[SweepEntry]:
    """Points along the length: each batch and length."""
    point = next(e for e in sweep("small-bf16") if e.axis == "seq_len" and e.who == "v3")
    return [replace(point, batch_size=b, seq_len=t, **fields) for b, t in sizes]


@pytest.mark.parametrize(
    ("found", "tables", "plots", "notes"),
    [
        (placed((8, 128)), 0, 0, 0),
        (placed((8, 128), (8, 256)), 1, 2, 0),
        (placed((8, 128), (8, 128), (8, 256)), 1, 2, 0),
        (placed((4, 512), (8, 128), (8, 256)), 1, 2, 0),
        (placed((4, 512), (8, 128), (8, 128)), 0, 0, 0),
        (placed((8, 128)) + placed((8, 256), seconds=None, cannot="no memory"), 1, 0, 1),
        (placed((8, 128), (8, 256)) + placed((8, 512), peak_bytes=None), 1, 2, 0),
        (placed((8, 128)) + placed((8, 256), peak_bytes=None), 1, 1, 0),
        (placed((8, 128), (8, 256)) + placed((8, 512), seconds=None, cannot="no"), 1, 2, 1),
    ],
)
def test_a_sweep_is_drawn_where_two_places_were_measured(
    found: list[SweepEntry], tables: int, plots: int, notes: int
) -> None:
    of = record("sweep-small-bf16", found)
    panel = sweeps.panel(context([of]), of, ("small", "bf16"), "i")
    assert (len(panel.aside), len(panel.figures), len(panel.notes)) == (tables, plots, notes)
    assert panel.tables[0].rows


def test_a_row_says_who_and_what_in_words() -> None:
    """Layouts by the worst, the loss where it is known, a description with its software."""
    found, layouts = context(sample_records()), {"a": ratio(1.2), "b": ratio(3.4), "c": ratio(2.0)}
    op = replace(record("g", ops()).of(OpEntry)[0], layouts=layouts)
    whole = step("small-bf16", "v3")
    for made, entry, wanted in (
        (
            columns.op(found.who, "v1"),
            op,
            {"worst layout": ("3.40", "b"), "pass": ("forward", "normal")},
        ),
        (
            columns.step(found.who, "v1"),
            whole,
            {
                "loss": ("7.04 → 6.93", ""),
                "gradients": ("74/74", ""),
                "description": ("Triton kernels", "torch 2.11.0"),
                "run as": ("compile + capture", ""),
            },
        ),
    ):
        full = table("t", made, [entry])
        cells = dict(zip((h.name for h in full.headers), full.rows[0].cells, strict=True))
        assert {name: (cells[name].text, cells[name].note) for name in wanted} == wanted
    unknown = replace(whole, last_loss=None, title=None)
    names = [h.name for h in table("t", columns.step(found.who, "v1"), [unknown]).headers]
    assert not {"loss", "description"} & {*names}


def test_a_figure_stands_under_its_unit() -> None:
    """Of each column: what the record holds, in the unit of the header."""
    found = context(sample_records())
    scales = {
        "ms / step": 1e3,
        "µs": 1e6,
        "MiB": 2.0**-20,
        "%": 100,
        "%, 99%": 100,
        "GB / s": 1e-9,
        "TFLOP / s": 1e-12,
    }
    values = {
        StepEntry: "seconds over_baseline floor_share peak_bytes kernels joules_per_sample mfu "
        "samples_per_second tokens_per_second device_seconds host_seconds live_bytes copies "
        "host_syncs watts compile_seconds",
        OpEntry: "seconds bandwidth_share roofline_share peak_bytes over_baseline bytes_per_second "
        "flops_per_second flops_share kernels host_seconds",
        SweepEntry: "batch_size seq_len seconds samples_per_second peak_bytes",
    }
    entries = [step("small-bf16", "v3"), *ops()[2:3], *sweep("small-bf16")[-1:]]
    wanted = [columns.step, columns.op]
    for entry, kind in zip(entries, values, strict=True):
        made = wanted.pop(0)(found.who, "v1") if wanted else columns.sweep(found.who)
        full = table("t", made, [entry])
        shown = {
            (header.name, header.unit): cell.text
            for header, cell in zip(full.headers, full.rows[0].cells, strict=True)
            if re.fullmatch(r"[\d.,e+-]+", cell.text)
        }
        there = [name for name in values[kind].split() if getattr(entry, name) is not None]
        assert len(there) == len(values[kind].split()) == len(shown) - (kind is OpEntry)
        for name, ((_, unit), text) in zip(there, shown.items(), strict=False):
            value = getattr(entry, name)
            expected = (value[0] if isinstance(value, tuple) else value) * scales.get(unit, 1)
            assert float(text.replace(",", "")) == pytest.approx(expected, rel=6e-3), name


def test_an_op_is_drawn_with_its_largest_case_at_its_intensity(drawn: list[Axes]) -> None:
    """And the caption is about ours, although a peer comes nearer to the ceilings."""
    found = record("ops-bf16", ops())
    found.entries = [
        replace(e, roofline_share=0.999) if isinstance(e, OpEntry) and e.who == "liger" else e
        for e in found.entries
    ]
    panel = op_panels.panel(context([found]), found, "bf16", "i")
    largest = [e for e in found.of(OpEntry) if e.passes == "forward" and "B=8," in e.case]
    dots = [each[0] for each in points(drawn[0]) if len(each) == 1]
    assert len(dots) == len(largest)
    expected = [((e.flops or 0) / (e.bytes or 1), (e.flops or 0) / e.time) for e in largest]
    assert sorted(dots) == [pytest.approx(each) for each in sorted(expected)]
    slope, peak = points(drawn[0])[:2]
    assert slope[1][1] == pytest.approx(PEAK)
    assert peak[1][1] == pytest.approx(PEAK)
    for figure, passes in zip(panel.figures, ("Forward", "Forward+backward"), strict=True):
        shares = {
            e.roofline_share or 0.0: f"{e.op} by {e.provider}"
            for e in found.of(OpEntry)
            if (e.passes, e.role) == (passes.lower(), "ours") and "B=8," in e.case
        }
        most, least = max(shares), min(shares)
        assert figure.caption == (
            f"{passes}: {shares[most]} comes nearest to its ceiling, {percent(most)}%; "
            f"{shares[least]} stays farthest from it, {percent(least)}%."
        )
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


def test_a_frame_leaves_its_margins_in_points() -> None:
    box = frame(230, left=46, bottom=38, right=16, top=24).get_position()
    assert (box.x0, box.y0) == pytest.approx((46 / WIDTH, 38 / 230))
    assert (box.width, box.height) == pytest.approx(((WIDTH - 62) / WIDTH, (230 - 62) / 230))


def test_the_room_beside_named_places_grows_with_their_number(drawn: list[Axes]) -> None:
    for count, margin in ((2, 0.25), (13, 0.72), (14, 0.78), (15, 0.84)):
        line = plots.Line(KEY, tuple((n, 1.0) for n in range(count)))
        plots.lines([line], "x", "y", "i", "l", [f"{n}" for n in range(count)])
        assert drawn[-1].get_xlim() == pytest.approx((-margin, count - 1 + margin))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3e12, "3 T"),
        (1e12, "1 T"),
        (9e11, "900 G"),
        (1e9, "1 G"),
        (1e6, "1 M"),
        (-5e6, "-5 M"),
        (9e5, "900 k"),
        (1e4, "10 k"),
        (9999.0, "9999"),
        (0.25, "0.25"),
    ],
)
def test_a_number_on_an_axis_is_short(value: float, shown: str) -> None:
    assert tick(value) == shown


def test_an_op_with_one_entry_has_its_letter_and_its_row() -> None:
    found = record("ops", ops())
    op = found.of(OpEntry)[-1].op
    one = next(e for e in found.of(OpEntry) if e.op == op and e.passes == "forward")
    rest = [e for e in found.entries if not isinstance(e, OpEntry) or e.op != op]
    panel = op_panels.panel(context([found]), replace(found, entries=[*rest, one]), "bf16", "i")
    (key,) = panel.aside
    shown = [cell.text for cell in key.rows[-1].cells]
    assert shown[0].endswith(f" {op}")
    assert any("%" in text or text[:1].isdigit() for text in shown[1:]), shown
