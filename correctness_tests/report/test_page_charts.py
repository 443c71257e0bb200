"""What is drawn on the page: who has which colour and mark, and where each thing stands."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from correctness_tests.support.sample_records import (
    SHARES,
    bare_step,
    ops,
    ratio,
    record,
    sample_records,
    step,
    steps,
)
from tinyllama.harness.page import NEEDS
from tinyllama.harness.records.entries import OpEntry, StepEntry, SweepEntry
from tinyllama.harness.records.numbers import MISSING
from tinyllama.harness.records.results import Record, records
from tinyllama.ops import OPS

if not all(map(importlib.util.find_spec, NEEDS)):
    pytest.skip("needs the extra 'report'", allow_module_level=True)


from tinyllama.harness.page import captions, claims, panels, svg, trend
from tinyllama.harness.page.charts import Chart, Scale
from tinyllama.harness.page.keys import FLOOR, Keys
from tinyllama.harness.page.panels import Context, Panel, Steps

RESULTS = Path(__file__).parents[2] / "results"


def context(several: Sequence[Record]) -> Context:
    return Context(Keys(several), "d0")


# -- colours and marks ------------------------------------------------------------------------


def registered() -> list[OpEntry]:
    found = next(e for r in sample_records() for e in r.of(OpEntry))
    return [
        replace(found, op=op.name, provider=name) for op in OPS.values() for name in op.providers
    ]


def test_of_64_names_each_looks_its_own_and_those_that_follow_each_other_differ_in_both() -> None:
    names = [f"tier {number:02}" for number in range(64)]
    for role in ("tier", "peer"):
        one = record("g", [bare_step("small-fp32", name, role) for name in names])
        found = [Keys([one]).of(entry) for entry in one.entries]  # type: ignore[arg-type]
        looks = [(key.colour, key.shape) for key in found]
        assert len(set(looks)) == 64
        for first in range(58):
            for part in zip(*looks[first : first + 7], strict=True):
                assert len(set(part)) == 7
        assert {key.hollow for key in found} == {role == "peer"}


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
    assert {len(row.cells) for row in table.rows} == {len(table.headers)}
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


def test_where_it_is_unknown_when_kernels_ran_nothing_is_idle() -> None:
    entry = replace(step("small-bf16", "v3"), busy_seconds=None)
    first, split = panels.parts(context(sample_records()), [group(entry)])
    assert "part-idle" not in [part.colour for part in chart(first).rows[0].parts]
    assert split.summary == "v3 spends most on products: 41.6% of its step."


def test_without_a_tier_nobody_is_said_to_spend_most() -> None:
    (split,) = panels.parts(context(sample_records()), [group(step("small-bf16", "hf-eager"))])
    assert split.summary == "Most idle: hf-eager, 79.0% of its step without a kernel."


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
    runs[-1].versions, runs[0].date = {"torch": "9"}, "2025-01-01T00:00:00Z"
    panel = trend.against(context(runs), {("small", "bf16"): runs})
    assert panel is not None
    assert trend.against(context(runs), {("small", "bf16"): runs[1:]}) == panel
    (table,) = panel.tables
    assert table.folded == (seen == trend.NONE)
    texts = [cell.text for cell in table.rows[0].cells]
    assert texts[:3] == ["v3", "2.91", "1.94"]
    assert [cell.note for cell in table.rows[0].cells[:3]] == ["small bf16", *["2026-03-02"] * 2]
    assert [float(text) for text in texts[3:5]] == [100 * last[0], 100 * before[0]]
    assert texts[5] == seen
    assert "torch 2.11.0 → 9" in texts[6]
    assert trend.against(context(runs), {("small", "bf16"): runs[:1]}) is None
    assert trend.change(None, runs[0].of(StepEntry)[0].floor_share) == MISSING


def test_a_history_says_from_when_to_when() -> None:
    def said(*dates: str) -> str:
        runs: Any = [SimpleNamespace(date=f"{date}T10:00") for date in dates]
        return captions.history(runs, {})

    assert said("2026-01-02", "2026-01-03", "2026-02-01") == "3 runs, 2026-01-02 to 2026-02-01."
    assert said("2026-01-02", "2026-01-02") == "2 runs, 2026-01-02."


def test_each_colour_of_a_plot_is_one_of_the_page() -> None:
    page = (Path(svg.__file__).parent / "page.css").read_text()
    assert all(f"--{name}:" in page for name in svg.NAMES)


def test_a_metric_is_shown_in_the_unit_that_it_is_said_to_have() -> None:
    for name, (said, scale) in claims.METRICS.items():
        expected = 100.0 if "%" in said else 2.0**-20 if "MiB" in said else 1.0
        assert scale == expected, name
