"""The page made from records: what it says."""

import html
import importlib.util
import re
from dataclasses import replace
from urllib.parse import quote

import pytest

from correctness_tests.support.sample_records import (
    CONTENDERS,
    FIRST,
    OPS,
    PROVIDERS,
    SECOND,
    record,
    sample_records,
    sample_targets,
    step,
    steps,
)
from tinyllama.harness.page import NEEDS, render
from tinyllama.harness.records.entries import Timed, entry_as_json, entry_from_json

PLOTS = all(importlib.util.find_spec(name) for name in NEEDS)
needs_plots = pytest.mark.skipif(not PLOTS, reason="needs the extra 'report'")
NEVER = "never run on AMD MI325X hardware"
CAVEAT = "1 of 74 parameters"


@pytest.fixture(scope="module")
def text() -> str:
    if not PLOTS:
        pytest.skip("needs the extra 'report'")
    return render(sample_records(), sample_targets())


def visible(text: str) -> str:
    """The words of a page, without tags and drawings."""
    text = re.sub(r"<(style|svg|title|script)\b.*?</\1>", " ", text, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


@pytest.mark.long
def test_every_device_contender_and_op_is_there(text: str) -> None:
    words = visible(text)
    for name in (FIRST, SECOND, *CONTENDERS, *OPS, *PROVIDERS, "megatron"):
        assert name in words
    assert words.count("megatron peer cannot run: SYNTHETIC: needs a toolkit") == 4  # in ladders


def test_every_ratio_is_there_with_its_interval(text: str) -> None:
    words = visible(text)
    assert "24.8 [24.3, 25.3]" in words
    assert "0.880 [0.862, 0.897]" in words
    assert words.count("13.0 [12.7, 13.2]") == 4  # v2, in each group of each device


def test_the_sections_answer_in_their_order(text: str) -> None:
    wanted = (
        "bars",
        "ladder",
        "roofline",
        "split",
        "sweep",
        "history",
        "gate",
        "benchmarks",
    )
    assert re.findall(r'<section id="d0-(\w+)"', text) == list(wanted)


def test_every_benchmark_has_a_row_that_the_tables_lead_to(text: str) -> None:
    """Each complete record's step, op and point of a sweep, once for each device."""
    wanted = {
        f"d{(FIRST, SECOND).index(r.device)}-{quote(entry.name)}"
        for r in sample_records()
        for entry in r.of(Timed)
        if r.complete and entry.ran
    }
    section = text[text.index('<section id="d0-benchmarks"') :]
    rows = [html.unescape(row) for row in re.findall(r'<tr id="([^"]*)"', section)]
    assert sorted(r for r in rows if "-bar/" not in r) == sorted(wanted)
    links = {html.unescape(link) for link in re.findall(r'href="#([^"]+)"', text)}
    assert wanted <= links


def test_a_benchmark_shows_its_quartiles_in_every_run(text: str) -> None:
    """Three runs of v3 in medium-bf16, each faster than the one before: their boxes are on one
    scale, from the first quartile of the fastest to the third of the slowest."""
    (row,) = re.findall(r'<tr id="d0-step/medium-bf16/v3">(.*?)</tr>', text, flags=re.S)
    boxes = re.findall(
        r'<i style="left:([\d.]+)%;width:([\d.]+)%"></i><b style="left:([\d.]+)%">', row
    )
    first, _, last = [tuple(map(float, box)) for box in boxes]
    scale = 100 / (1.04 * 1.3 - 0.97)
    expected = [(0.97 * 1.3 - 0.97), 0.07 * 1.3, (1.3 - 0.97)]
    assert first == pytest.approx([each * scale for each in expected], abs=0.06)
    assert last == pytest.approx([0, 0.07 * scale, 0.03 * scale], abs=0.06)
    words = visible(row)
    assert "13.6 13.2–14.1 7.00 100 3 13.2 to 18.4" in words


def test_only_complete_records_are_shown(text: str) -> None:
    words = visible(text)
    assert "small tf32" not in words
    assert "incomplete and not shown: small-tf32 of 2026-03-02" in words


def test_the_newest_record_of_each_group_is_shown_and_the_others_are_history(text: str) -> None:
    ladder, history = text.index("d0-ladder"), text.index("3 runs, 2026-01-05 to 2026-03-02")
    assert "24.1 ms" in text[ladder:history]
    assert "31.3 ms" not in visible(text[ladder:history])
    assert "v1 31.3 ms, then 24.1 ms" in text[history:]
    assert "torch 2.10.0 → 2.11.0, triton 3.5.1 → 3.6.0" in visible(text)


def test_published_figures_carry_their_caveat_and_where_nothing_was_ever_run(text: str) -> None:
    for row in re.findall(r"<tr.*?</tr>", text, flags=re.S):
        if "MI325X" in row:
            assert NEVER in row
            assert CAVEAT in row
    assert text.count("MI325X") >= 3


@pytest.mark.long
@needs_plots
def test_a_record_of_that_device_ends_the_remark_but_not_the_caveat() -> None:
    own = record("small-bf16", steps("small-bf16"), device="SYNTHETIC AMD MI325X")
    words = visible(render([*sample_records(), own], sample_targets()))
    assert NEVER not in words
    assert CAVEAT in words


@needs_plots
def test_text_of_records_is_escaped() -> None:
    evil = "SYNTHETIC <script>alert(1)</script> & \"$x_1$\" 'device'"
    entry = replace(step("small-bf16", "v2"), contender="<b>v2</b> $x_1$", title="<img src=x>")
    text = render([record("small-bf16", [entry], device=evil)], title="<i>t</i>")
    assert "<script>alert" not in text
    assert "<b>v2" not in text
    assert "<img" not in text
    assert "<i>t" not in text
    assert evil in visible(text)
    assert "<b>v2</b> $x_1$" in visible(text)


@pytest.mark.long
def test_equal_records_give_equal_pages(text: str) -> None:
    assert render(list(reversed(sample_records())), sample_targets()) == text


def test_ids_are_unique_and_every_reference_has_one(text: str) -> None:
    found = re.findall(r' id="([^"]+)"', text)
    assert len(found) == len(set(found))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)|labelledby="([^"]+)"', text)
    assert {name for names in used for name in names if name} <= set(found)


def test_nothing_is_loaded_and_no_script_runs(text: str) -> None:
    assert not re.findall(r"(?:src|href)=\"(?!#|data:,)|url\((?!#)|@import|<script", text)
    assert "http://" not in text
    assert "https://" not in text


def test_one_run_is_no_history(text: str) -> None:
    first, last = text.split('<section class="device" id="d1"')
    assert (
        first.count("<figure") == 1 + (1 + 3) + 3 + 2 + 4
    )  # ladder, split, history, roofline, sweep
    assert last.count("<figure") == 1 + (1 + 1) + 0 + 2 + 0
    assert "pytest perf_tests --record" in last[last.index('<section id="d1-history"') :]


@needs_plots
def test_what_is_missing_is_said_with_the_command_that_fills_it() -> None:
    text = render([record("ops", [], device=SECOND)])
    assert "<figure" not in text
    assert text.count("pytest perf_tests --record") >= 5
    assert "pytest perf_tests --record" in render([])


@needs_plots
def test_a_device_of_which_nothing_is_shown_comes_last_and_says_no_claims_of_others() -> None:
    few = [record("small-bf16", steps("small-bf16"), device=SECOND)]
    nothing = [record("scaling", []), record("part", steps("small-bf16"), complete=False)]
    text = render([*nothing, *few], sample_targets())
    names = re.findall(r'<h2 id="d\d-name">(.*?)</h2>', text)
    assert names == [SECOND, FIRST]
    last = text[text.index('<section class="device" id="d1"') :]
    assert "No target is about what was measured on this device." in last
    assert "MI325X" not in last
    assert "bars met" not in last


@pytest.mark.long
@needs_plots
def test_where_only_ops_are_timed_nothing_is_said_of_steps() -> None:
    text = render([r for r in sample_records() if r.group == "ops-bf16"])
    found = re.findall(r'<section id="d0-(\w+)"', text)
    assert found == ["bars", "roofline", "gate", "benchmarks"]


@needs_plots
def test_few_fields_are_enough() -> None:
    """A record of the first schema: tiers, times and ratios."""
    kept = ("name", "kind", "workload", "precision", "contender", "role", "seconds", "over_v1")
    whole = [entry_as_json(step("small-bf16", tier)) for tier in ("v1", "v2")]
    few = [entry_from_json("", {k: v for k, v in e.items() if k in kept}) for e in whole]
    words = visible(render([replace(record("steps", few), machine={})]))
    assert "13.0 [12.7, 13.2]" in words
    assert "driver not recorded" in words
    assert "Not in this record: floor share, peak" in words


@needs_plots
def test_what_was_left_out_is_said_once_with_its_reason() -> None:
    from tinyllama.harness.page import facts

    whole, part = record("small-bf16", steps("small-bf16")), record("x", [], complete=False)
    gone = replace(step("small-bf16", "v2"), unavailable={"watts": "SYNTHETIC: no sensor"})
    whole.entries.append(replace(gone, name="another"))
    assert facts.left_out([whole, part], [whole]) == (
        "hf-eager, hf-compiled, liger, torchtitan without capture: "
        "SYNTHETIC: allocates within a step",
        "megatron cannot run: SYNTHETIC: needs a toolkit that is not installed",
        "v2 watts not measured: SYNTHETIC: no sensor",
        "incomplete and not shown: x of 2026-03-02",
    )


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tinyllama-harness\[report\]'"):
        render([])
