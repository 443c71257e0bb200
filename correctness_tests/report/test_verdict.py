"""The verdict on two records: what is slower, what is missing, and that nothing else is green."""

from typing import Any

import pytest
from msgspec.structs import replace

from correctness_tests.support.sample_records import bare_step, plain_record
from tinyllama.harness.records.entries import CeilingEntry, Entry, OpEntry, Ratio, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.verdict import TOLERANCES, Outcome, Verdict, compare, judge


def record(*entries: Entry, **fields: Any) -> Record:
    return plain_record(entries=list(entries), **fields)


def step(seconds: Any = 1.0, name: str = "step/v1", **fields: Any) -> StepEntry:
    """A step whose quartiles are 1% from its seconds."""
    if isinstance(seconds, (int, float)):
        fields = {"seconds_quartiles": (0.99 * seconds, 1.01 * seconds), **fields}
    return bare_step("small-fp32", "v1", **{"name": name, "seconds": seconds, **fields})


def op(**layouts: Ratio) -> OpEntry:
    texts: dict[str, Any] = dict.fromkeys(
        ("op", "provider", "role", "case", "dtype", "values", "passes"), "x"
    )
    return OpEntry(name="op/x", seconds=1.0, layouts=layouts, **texts)


def verdict_of(before: Entry | None, after: Entry | None) -> Verdict:
    (verdict,) = compare(*(record(*([entry] if entry else [])) for entry in (before, after)))
    return verdict


OFF = step(None, cannot="no bf16")
WIDE = step(seconds_quartiles=(0.9, 1.3))


@pytest.mark.parametrize(
    ("before", "after", "outcome", "text"),
    [
        (step(), step(1.04), "SAME", ""),
        (step(), step(1.06), "SLOWER", "seconds 1.060 times (1.05 allowed)"),
        (step(), step(0.9), "FASTER", ""),
        # Known to be slower only above the upper quartile.
        (step(), step(1.2, seconds_quartiles=(1.0, 1.4)), "INCONCLUSIVE", "overlap"),
        (WIDE, step(1.2), "INCONCLUSIVE", "overlap"),
        (WIDE, step(1.4), "SLOWER", ""),
        # What is zero may not become one. Energy is not gated.
        (step(copies=0), step(copies=1), "SLOWER", ""),
        (step(watts=100.0), step(watts=900.0), "SAME", ""),
        # What is missing or new is never green, and says why.
        (step(peak_bytes=5), step(), "MISSING", ""),
        (step(), step(peak_bytes=5), "NO_BASELINE", ""),
        (step(), OFF, "MISSING", "no bf16"),
        (OFF, OFF, "SAME", "does not run: no bf16"),
        (OFF, step(), "NO_BASELINE", ""),
        (None, OFF, "NO_BASELINE", "does not run: no bf16"),
        # A peer never fails; no benchmark escapes by calling itself one.
        (step(role="peer"), step(9.0, role="peer"), "SAME", "not gated: slower: "),
        (step(role="floor"), None, "SAME", "in the baseline, not in this run"),
        (step(), step(9.0, role="peer"), "SLOWER", ""),
    ],
)
def test_the_verdict_on_a_pair_of_entries(
    before: Entry | None, after: Entry | None, outcome: str, text: str
) -> None:
    verdict = verdict_of(before, after)
    assert verdict.outcome.name == outcome
    assert text in str(verdict)


@pytest.mark.parametrize("metric", ["seconds", "peak_bytes", "live_bytes", "kernels", "copies"])
def test_each_metric_is_gated_by_its_own_tolerance(metric: str) -> None:
    def of(value: float) -> Entry:
        values: dict[str, Any] = {metric: value}
        return replace(step(**values), seconds_quartiles=None)

    allowed = 100 * TOLERANCES[metric]
    assert verdict_of(of(100), of(allowed)).outcome is Outcome.SAME
    assert verdict_of(of(100), of(allowed + 1)).outcome is Outcome.SLOWER


def test_layouts_are_gated_one_by_one() -> None:
    before = op(strided=Ratio(1.0, 1.0, 1.0), transposed=Ratio(1.0, 0.9, 1.1))
    after = op(strided=Ratio(1.2, 1.2, 1.2), transposed=Ratio(1.05, 1.0, 1.1))
    verdict = verdict_of(before, after)
    assert {figure.metric: figure.outcome.name for figure in verdict.figures} == {
        "seconds": "SAME",
        "layouts strided": "SLOWER",
        "layouts transposed": "SAME",
    }


def test_ceilings_are_not_compared() -> None:
    fast, slow = (CeilingEntry(name="ceiling/copy", bytes_per_second=b) for b in (2.0, 1.0))
    assert compare(record(fast), record(slow)) == []


# -- the baseline -----------------------------------------------------------------------------


def judged(candidate: Record, *stored: Record) -> list[str]:
    return [verdict.outcome.name for verdict in judge(candidate, stored)]


def test_the_baseline_is_the_newest_complete_clean_record_of_the_setting() -> None:
    slow, fast = record(step(2.0)), record(step(1.0))
    now = record(step(2.0), commit="b" * 40 + "+dirty")
    assert judged(now, fast, slow) == ["SAME"]
    assert judged(now, slow, fast) == ["SLOWER"]
    for fields in (
        {"complete": False},
        {"commit": "c" * 40 + "+dirty"},
        {"group": "other"},
        {"versions": {"torch": "3.0"}},
        {"device": "another card"},
    ):
        assert judged(now, slow, replace(fast, **fields)) == ["SAME"], fields


def test_without_a_baseline_the_reason_is_told() -> None:
    now = record(step())
    assert judged(now) == ["NO_BASELINE"]
    versions = {"torch": "1.0", "triton": "3"}
    verdict = judge(now, [replace(now, versions=versions)])[0]
    assert verdict.outcome is Outcome.OTHER_DEVICE_OR_VERSION
    assert verdict.text.endswith("torch 1.0 -> 2.0, triton 3 -> none")
    assert "MISSING" in judged(record(), record(step())), "a group that measured nothing"
