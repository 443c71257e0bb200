"""Where a page changes over: the last value that is drawn one way, and the first drawn another."""

import importlib.util
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from correctness_tests.support.irregular_records import CERTIFICATE
from correctness_tests.support.sample_records import (
    FIRST,
    bare_step,
    plain_record,
    record,
    step,
    sweep,
    target,
)
from tinyllama.harness.page import NEEDS
from tinyllama.harness.records.entries import Quartiles, StepEntry
from tinyllama.harness.records.history import Change, Reading, Series

if not all(map(importlib.util.find_spec, NEEDS)):
    pytest.skip("needs the extra 'report'", allow_module_level=True)

from matplotlib.colors import to_hex

from tinyllama.harness.page import (
    benchmarks,
    captions,
    certified,
    changes,
    claims,
    panels,
    plots,
    roofline,
    select,
    svg,
    sweeps,
)
from tinyllama.harness.page.charts import Scale, shares
from tinyllama.harness.page.keys import Keys
from tinyllama.harness.page.panels import Context, Steps

KEY = svg.Key("one", "series-0", "o")
GROUP = ("small", "bf16")


def context(*entries: StepEntry) -> Context:
    return Context(Keys([record("small-bf16", entries)]), "d0")


def names(ticks: tuple[tuple[float, str], ...]) -> str:
    return " ".join(text for _, text in ticks)


# -- scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (1, 10, "1 2 5 10"),
        (1.01, 9.9, "2 5"),
        (1, 999, "1 2 5 10 20 50 100 200 500"),
        (1, 1000, "1 10 100 1000"),
        (10, 9999, "10 20 50 100 200 500 1000 2000 5000"),
    ],
)
def test_ticks_are_fewer_over_three_decades(low: float, high: float, shown: str) -> None:
    assert names(Scale(low, high).ticks()) == shown


@pytest.mark.parametrize(
    ("whole", "shown"),
    [
        (1.0, "0 20 40 60 80 100"),
        (1.2, "0 20 40 60 80 100 120"),
        (1.21, "0 50 100"),
        (1.99, "0 50 100 150"),
        (2.0, "0 50 100 150 200"),
    ],
)
def test_shares_beyond_all_have_ticks_further_apart(whole: float, shown: str) -> None:
    assert names(shares(whole)) == shown


@pytest.mark.parametrize(("whole", "said"), [(1.0, False), (1.01, False), (1.02, True)])
def test_kernels_beside_each_other_are_said_from_more_than_a_hundredth(
    whole: float, said: bool
) -> None:
    entry = bare_step("small-bf16", "v3", seconds=1.0, time_by={"products": whole})
    (first, _) = panels.parts(context(entry), [Steps(record("g", [entry]), "t", [entry])])
    caption = "More than 100%: kernels ran beside each other."
    assert first.figures[0].caption == (caption if said else "")


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(1.0, 10.5, "1 2 5 10"), (1.0, 299.0, "1 2 5 10 20 50 100 200"), (1.0, 300.0, "1 10 100")],
)
def test_a_logarithmic_axis_names_decades_alone_where_they_are_many(
    low: float, high: float, shown: str
) -> None:
    axes = svg.frame(230, left=46, bottom=38, right=16, top=24)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    plots._y_ticks(axes)
    assert axes.get_ylim() == pytest.approx((low, high))
    places = [float(at) for at in axes.yaxis.get_majorticklocs() if low <= at <= high * (1 + 1e-9)]
    found = axes.yaxis.get_major_formatter().format_ticks(places)
    assert " ".join(found) == shown
    assert axes.yaxis.get_major_locator().numticks == 20  # type: ignore[attr-defined]


def test_a_narrow_axis_is_widened_to_a_decade_around_its_middle() -> None:
    axes = svg.frame(230, left=46, bottom=38, right=16, top=24)
    axes.set_yscale("log")
    axes.set_ylim(2.0, 4.5)
    plots._y_ticks(axes)
    assert axes.get_ylim() == pytest.approx((3 / math.sqrt(10), 3 * math.sqrt(10)))


def test_names_are_left_out_where_they_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last is always there; one as far from the next as it is wide has room."""

    def shown(width: float) -> list[str]:
        found: list[Any] = []
        axes: Any = SimpleNamespace(
            transData=SimpleNamespace(transform=lambda points: 10 * np.asarray(points)),
            xaxis=SimpleNamespace(
                set_minor_formatter=lambda _: None, set_minor_locator=lambda _: None
            ),
            set_xticks=lambda places, names: found.append((places, names)),
        )
        plots._x_ticks(axes, [0, 1, 2, 3], ["a", "b", "c", "d"], width)
        ((places, names),) = found
        assert places == ["abcd".index(name) for name in names]
        return list(names)

    assert shown(20) == ["d", "b"]
    assert shown(20.1) == ["d", "a"]
    assert shown(10) == ["d", "c", "b", "a"]
    assert shown(31) == ["d"]
    widths: list[float] = []
    monkeypatch.setattr(plots, "_x_ticks", lambda *_, width: widths.append(width))
    line = plots.Line(KEY, ((1.0, 3.0), (4.0, 50.0)))
    for days in (["2026-01-05", "2026-02-10"], []):  # of a day; of a power of two
        plots.lines([line], "x", "y", "i", "l", days)
    assert widths == [78, 34]


# -- how a plot looks --------------------------------------------------------------------------


def test_a_frame_is_drawn_in_the_page_s_style() -> None:
    axes = svg.frame(230, left=46, bottom=38, right=16, top=24)
    visible = {name for name, spine in axes.spines.items() if spine.get_visible()}
    assert visible == {"left", "bottom"}
    grid = svg.colour("grid")
    assert {to_hex(spine.get_edgecolor()) for spine in axes.spines.values()} == {grid}
    for axis in (axes.xaxis, axes.yaxis):
        line = axis.get_gridlines()[0]
        assert (to_hex(line.get_color()), line.get_linewidth()) == (grid, 0.7)
        tick: Any = axis.get_major_ticks()[0]
        assert (tick.get_pad(), tick.label1.get_fontsize()) == (3, 11)
    plots.name_axes(axes, "x", "y")
    assert axes.xaxis.labelpad == 3
    assert (svg.FONT, svg.WIDTH, len(svg.COLOURS), len(svg.MARKS)) == (11, 312, 8, 8)


def test_a_dashed_line_and_a_dotted_mark_have_their_strokes() -> None:
    line = plots.Line(KEY, ((0, 3.0), (1, 4.0)), dashed=True)
    plot = plots.lines([line], "run", "ms", "i", "l", ["a", "b"], [0.5])
    strokes = re.findall(r"stroke-dasharray: ([\d.,]+); stroke-dashoffset: ([\d.]+)", plot.svg)
    assert sorted(set(strokes)) == [("2.4,2.4", "0"), ("6.4,3.2", "0")]  # times the widths


def test_every_colour_of_a_drawing_is_one_of_the_page() -> None:
    """And numbers have two digits, the tips are titles, no text of them is markup, and nothing but
    ours has an id."""
    assert len({svg.colour(name) for name in svg.NAMES}) == len(svg.NAMES)
    assert len({svg.Key("", "", mark).path for mark in svg.MARKS}) == len(svg.MARKS)
    axes = svg.frame(100, 10, 10, 10, 10)
    for place, name in enumerate(svg.NAMES):
        key = svg.Key(name, name, "o")
        plots.marker(axes, place / 7, place / 3, key, gid=f"mark{place}")
    tips = {f"mark{place}": f"the <i> {name}" for place, name in enumerate(svg.NAMES)}
    drawn = svg.to_svg(axes, "i", 'a "label" <b>', tips)
    for name in svg.NAMES:
        assert f"var(--{name})" in drawn
        assert f"<g><title>the &lt;i&gt; {name}</title>" in drawn
    assert not re.findall(r' (?:d|x|y|transform)="[^"]*\.\d{3,}', drawn)
    assert not re.findall(r"#5e|<b>|<style|<metadata|<!--|xlink| id=\"mark|\n", drawn)
    label = "a &quot;label&quot; &lt;b&gt;"
    said = f'role="img" aria-label="{label}"><title>{label}</title>'
    assert drawn.startswith(f'<svg viewBox="0 0 312 100" {said}')
    assert drawn.endswith("</svg>")


def test_ids_in_a_drawing_are_of_its_place_in_the_page() -> None:
    def ids(ident: str, label: str) -> set[str]:
        line = plots.Line(KEY, ((1.0, 3.0), (4.0, 50.0)))
        found = plots.lines([line], "x", "y", ident, label)
        assert found.svg.count("<svg") == found.svg.count("</svg>") == 1
        assert f"<title>{label}</title>" in found.svg
        assert "<title>one</title>" in found.svg
        return set(re.findall(r' id="([^"]+)"', found.svg))

    assert ids("one", "a") == ids("one", "b") != ids("two", "a")


def test_a_roofline_has_no_more_names_than_have_room() -> None:
    axes = svg.frame(300, left=46, bottom=38, right=18, top=36)
    roofline._ticks(axes)
    for axis in (axes.xaxis, axes.yaxis):
        both: Any = (axis.get_major_locator(), axis.get_minor_locator())
        assert [locator.numticks for locator in both] == [7, 40]


# -- who comes first, and who is missing -------------------------------------------------------


def test_the_floor_comes_first_then_tiers_peers_by_time_and_others() -> None:
    found = [
        bare_step("small-bf16", "a", "of no kind", seconds=0.1),
        bare_step("small-bf16", "b", "peer", seconds=0.3),
        bare_step("small-bf16", "c", "peer", seconds=0.2),
        bare_step("small-bf16", "d", "peer", cannot="no"),
        bare_step("small-bf16", "f", "tier", seconds=0.1),
        bare_step("small-bf16", "e", "tier", seconds=0.9),
        bare_step("small-bf16", "z", "floor", seconds=0.5),
    ]
    order = [entry.who for entry in select.entries(record("g", found), StepEntry, GROUP)]
    assert order == ["z", "e", "f", "c", "b", "d", "a"]


def test_a_group_that_could_not_run_comes_first() -> None:
    some = [bare_step("small-bf16", "v1", seconds=0.5), bare_step("other-bf16", "v1", cannot="no")]
    assert [*select.history([record("g", some)], StepEntry)] == [("other", "bf16"), GROUP]


def test_one_contender_at_two_lengths_is_drawn() -> None:
    """Of each field that was measured at two, whichever comes last."""
    some = [e for e in sweep("small-bf16") if e.who == "v3" and e.axis == "seq_len"][:2]
    for entries, figures in (
        (some, 2),
        (some[::-1], 2),
        ([some[0], replace(some[1], peak_bytes=None)], 1),
        ([some[0], replace(some[1], cannot="no", seconds=None, peak_bytes=None)], 0),
    ):
        found = record("sweep-small-bf16", entries)
        panel = sweeps.panel(Context(Keys([found]), "d0"), found, GROUP, "i")
        assert len(panel.figures) == figures
        assert [len(table.rows) for table in panel.aside] == [2]
    found = record("sweep-small-bf16", some[:1])
    alone = sweeps.panel(Context(Keys([found]), "d0"), found, GROUP, "i")
    assert (alone.figures, alone.aside) == ((), ())


def test_quartiles_that_are_equal_are_a_line() -> None:
    entry = bare_step("small-bf16", "v3", seconds=0.5, seconds_quartiles=Quartiles(0.5, 0.5))
    panel = benchmarks.panel(context(entry), [record("small-bf16", [entry])])
    assert panel is not None
    assert panel.tables[0].rows[0].cells[-1].boxes == ((0, 0, 0),)


def test_a_certificate_may_have_one_figure_or_none() -> None:
    for count in (0, 1):
        found = {**CERTIFICATE, "found": CERTIFICATE["found"][:count]}
        _, figures = certified.panel(found).tables
        assert len(figures.rows) == count
        assert len(figures.headers) == 4 + 2 * count


def test_a_tier_whose_kernels_are_unknown_spends_nothing() -> None:
    known = replace(step("small-bf16", "v3"), time_by=None, busy_seconds=None)
    assert captions.parts([known]) == ""


def test_each_device_that_was_never_run_is_named_once() -> None:
    documented: dict[str, Any] = {"documented": True, "workload": ("absent",)}
    several = [
        target("speed", 2.0, device=(device,), **documented, precision=(precision,))
        for device, precision in (("AMD X", "a"), ("AMD X", "b"), ("AMD Y", "c"))
    ]
    entry = step("small-bf16", "v3")
    found = claims.claims(several, [entry], FIRST)
    panel = claims.panel(context(entry), found, [FIRST])
    assert panel is not None
    assert panel.notes == (
        "This project has never run on AMD X hardware and never run on AMD Y hardware.",
    )
    assert len(panel.tables[0].rows) == 3


def test_a_claim_that_was_measured_has_one_row() -> None:
    entry = step("small-bf16", "v3")
    claim = target("speed", 2.0, documented=True)
    other = target("mfu", 0.1, documented=True)
    for several in ([claim], [claim, other], [other, claim]):
        rows = claims.claims(several, [entry], FIRST)
        assert [row.call for row in rows] == [GROUP] * len(several)


def test_change_points_have_a_panel_for_each_group_and_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def series(entry: str, group: str, torch: str, *days: int) -> Series:
        readings = tuple(
            Reading(
                plain_record(
                    group=group,
                    versions={"python": "3", "torch": torch},
                    date=f"2026-01-{day:02}T09:30:00Z",
                    commit=f"{day:02}" * 20,
                ),
                1.0,
            )
            for day in days
        )
        return Series(entry, "seconds", readings)

    a, b = series("a", "g", "2.0", 2, 3, 4), series("b", "g", "2.0", 1, 9)
    c, d = series("c", "g", "2.1", 5, 6), series("d", "h", "2.0", 8, 7)
    found = {"a": [Change(a, 1, 1.0, 2.0), Change(a, 2, 2.0, 3.0)], "b": [Change(b, 1, 1.0, 4.0)]}
    monkeypatch.setattr(changes, "watched", lambda records: [a, b, c, d])
    monkeypatch.setattr(changes, "changes", lambda one: found.get(one.entry, []))
    first, second, third = changes.panels([])
    told = [(p.title, p.source, p.notes[1]) for p in (first, second, third)]
    assert told == [
        ("g", "2026-01-01 to 2026-01-09", "Of python 3, torch 2.0."),
        ("g", "2026-01-05 to 2026-01-06", "Of python 3, torch 2.1."),
        ("h", "2026-01-07 to 2026-01-08", "Of python 3, torch 2.0."),
    ]
    assert "2" in first.notes[0]
    (table,) = first.tables
    assert table.caption == "Changes of g"
    rows = [[cell.text for cell in row.cells][0::2] for row in table.rows]
    between = ["0202020202..0303030303", "0303030303..0404040404", "0101010101..0909090909"]
    assert rows == [[who, commits] for who, commits in zip("aab", between, strict=True)]
    assert (second.tables, third.tables) == ((), ())
