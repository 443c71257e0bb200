"""What the page says of claims and bars: one row for one metric, and one square for each row."""

import html
import importlib.util
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from correctness_tests.support.sample_records import (
    op_target,
    ops,
    record,
    sample_targets,
    step,
    steps,
    target,
)
from tinyllama.harness.page import NEEDS, render
from tinyllama.harness.records.entries import OpEntry, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import OpTarget, Target

if not all(map(importlib.util.find_spec, NEEDS)):
    pytest.skip("needs the extra 'report'", allow_module_level=True)

from tinyllama.harness.page import columns


def rows(
    targets: list[Target | OpTarget], records: list[Record] | None = None
) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """The rows of the bars, each cell as text; and the squares: where each leads, and its mark."""
    text = render(records or [record("small-bf16", steps("small-bf16"))], targets)
    section = text[text.index('id="d0-bars"') : text.index('id="d0-ladder"')]
    found = re.findall(r'<tr id="([^"]+)">(.*?)</tr>', section, flags=re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.S) for _, row in found]
    words = [[" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in row] for row in cells]
    squares = re.findall(r'<a class="[a-z-]+" href="#([^"]+)"[^>]*>(.)</a>', section)
    assert sorted(ident for ident, _ in squares) == sorted(ident for ident, _ in found)
    return [[html.unescape(cell) for cell in row] for row in words], squares


@pytest.mark.parametrize(
    ("direction", "bound", "verdict"),
    [
        (">=", 24.5, "✓ met"),
        (">=", 25.0, "✗ missed"),
        ("<=", 25.0, "✓ met"),
        ("<=", 24.5, "✗ missed"),
    ],
)
def test_a_bar_is_judged_by_the_median(direction: str, bound: float, verdict: str) -> None:
    bounds = (bound, None) if direction == ">=" else (None, bound)
    ((row,), ((_, mark),)) = rows([target("speed", bounds[0], at_most=bounds[1])])
    sign = "≥" if direction == ">=" else "≤"
    measured = "24.8 [24.3, 25.3]"
    assert row == ["v3", verdict, "speed over v1 small bf16", "–", measured, f"{sign} {bound:g}"]
    assert mark == verdict[0]


def test_claim_and_bar_of_one_metric_share_a_row() -> None:
    claim, bar = sample_targets()[4], target("speed", 20.0)
    ((row,), _) = rows([claim, bar])
    assert row[3].startswith("5.5 AMD MI325X, the published example; never run on AMD MI325X hard")
    assert "1 of 74 parameters" in row[3]
    assert [row[1], *row[4:]] == ["✓ met", "24.8 [24.3, 25.3]", "≥ 20"]


def test_of_several_bars_of_one_metric_each_must_hold() -> None:
    found, _ = rows([target("speed", 20.0), target("speed", 24.9, workload=())])
    assert [(row[1], row[5]) for row in found] == [("✗ missed", "≥ 20, ≥ 24.9")]


def test_a_claim_is_judged_on_its_own_device_alone() -> None:
    """And its row is there where nothing like it was measured."""
    claims: list[Any] = sample_targets()[4:6]
    one, absent = rows(claims)[0]
    assert one[1] == absent[1] == "· another device"
    assert absent[2:5] == ["samples / s absent any", absent[3], "–"]
    own = record("small-bf16", steps("small-bf16"), device="SYNTHETIC AMD MI325X")
    absent, one = rows(claims, [own])[0]
    assert (one[1], absent[1]) == ("✓ met", "– not measured")
    assert "never run" not in one[3]


def test_what_is_missed_comes_first_and_what_is_met_last() -> None:
    several: list[Any] = [
        target("speed", 20.0),
        target("held_bytes", None, at_most=1.0),
        sample_targets()[5],
        target("samples_per_second", 1e6),
    ]
    found, squares = rows(several)
    text = render([record("small-bf16", steps("small-bf16"))], several)
    assert 'The other bars <span class="muted">(2 rows)' in text, (
        "missed and claimed are not folded"
    )
    assert [mark for _, mark in squares] == ["✗", "·", "–", "✓"]
    assert [row[1][0] for row in found] == ["✗", "·", "–", "✓"]


OF_OP = next(entry for entry in ops() if isinstance(entry, OpEntry))


@pytest.mark.parametrize("entry", [steps("small-bf16")[0], OF_OP], ids=["step", "op"])
def test_each_column_of_memory_is_in_mebibytes(entry: Any) -> None:
    fields = [field for field in vars(entry) if field.endswith("_bytes")]
    given = replace(entry, **dict.fromkeys(fields, 300 * 2**20))
    made = columns.step if isinstance(entry, StepEntry) else columns.op
    cells = [one.cell(given) for one in made(Mock(), None) if one.header.unit == "MiB"]
    assert {cell and cell.text for cell in cells} == {"300"}


def test_units_are_those_of_the_row() -> None:
    several: list[Any] = [
        target("peak_bytes", None, at_most=2 * 2**30),
        target("mfu", 0.25),
        target("live_bytes", None, at_most=2 * 2**30),
        target("peak_bytes", None, at_most=0.54, over="v1"),
    ]
    entries = [replace(e, peak_bytes=2**30, live_bytes=2**29, mfu=0.3) for e in steps("small-bf16")]
    (missed, peak, mfu, live), _ = rows(several, [record("small-bf16", entries)])
    assert peak[2:] == ["peak, MiB small bf16", "–", "1,020", "≤ 2,048"]
    assert mfu[2:] == ["MFU, % small bf16", "–", "30.0", "≥ 25"]
    assert live[2:] == ["live, MiB small bf16", "–", "512", "≤ 2,048"]
    assert missed[2:] == ["peak over v1 small bf16", "–", "1.00", "≤ 0.54"]


@pytest.mark.long
def test_ops_have_bars_too_and_the_sum_is_said() -> None:
    bar = op_target(over=("torch", "liger"))
    records = [record("ops-bf16", ops()), record("small-bf16", [step("small-bf16", "v3")])]
    every: list[Any] = [bar, target("speed", 30.0), target("energy_of_nobody", 1.0)]
    share = replace(bar, metric="bandwidth_share", over=None, at_least=0.5)
    copies = [row[2:] for row in rows([share], records)[0]]
    assert copies[0][0].startswith("bandwidth, % of a copy rope")
    assert {row[-1] for row in copies} == {"≥ 50"}
    found, _ = rows(every, records)
    assert [[row[0], row[2]] for row in found if row[0] == "triton"] == [
        ["triton", "speed over torch / liger rope B=8,T=2048 bf16 forward"],
        ["triton", "speed over torch / liger rope B=0.8,T=2048 bf16 forward"],
    ]
    told = "2 of 4 bars met; 1 missed, 1 not measured"
    assert render(records, every).count(told) == 2  # in the list of devices, and over the squares


def test_a_bar_of_another_device_or_of_who_did_not_run_has_no_row() -> None:
    elsewhere = target("speed", 20.0, device=("SYNTHETIC other",))
    text = render(
        [record("small-bf16", steps("small-bf16"))],
        [elsewhere, replace(target("speed", 1.0), tier="megatron")],
    )
    assert "No target is about what was measured on this device." in text
