"""The verdict on two records: what is slower, what is missing, and that nothing else is green."""

import math
from dataclasses import replace
from typing import Any

import pytest

from correctness_tests.support.sample_records import bare_step, plain_record
from tinyllama.harness.records.entries import CeilingEntry, Entry, OpEntry, Ratio, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.verdict import (
    TOLERANCES,
    Outcome,
    check_tolerances,
    compare,
    judge,
    worst,
)


def record(*entries: Entry, **fields: Any) -> Record:
    return plain_record(entries=list(entries), **fields)


TEXTS = ("op", "provider", "role", "case", "dtype", "values", "passes")
OP: dict[str, Any] = dict.fromkeys(TEXTS, "x")


def entry(seconds: Any = 1.0, name: str = "step/v1", **values: Any) -> StepEntry:
    return bare_step("small-fp32", "v1", **{"name": name, **timing(seconds), **values})


def op(**layouts: Ratio) -> OpEntry:
    return OpEntry(name="op/x", **OP, **timing(1.0), layouts=layouts)


def timing(seconds: Any) -> dict[str, Any]:
    quartiles = [0.99 * seconds, 1.01 * seconds] if isinstance(seconds, (int, float)) else None
    return {"seconds": seconds, "seconds_quartiles": quartiles}


def outcome(before: Entry, after: Entry) -> Outcome:
    (verdict,) = compare(record(before), record(after))
    return verdict.outcome


def text(before: Entry, after: Entry) -> str:
    (verdict,) = compare(record(before), record(after))
    return str(verdict)


def test_exit_statuses_are_those_of_the_documents_and_the_worst_wins() -> None:
    statuses = {outcome.name: outcome.status for outcome in Outcome}
    assert statuses == {
        "IDENTICAL": 0,
        "SAME": 0,
        "FASTER": 0,
        "NEW": 0,
        "NOT_DECIDED": 9,
        "SLOWER": 10,
        "INCONCLUSIVE": 11,
        "NO_BASELINE": 12,
        "OTHER_DEVICE_OR_VERSION": 13,
        "BUSY": 14,
        "MISSING": 15,
        "WRONG_RESULT": 16,
        "WORKER_DIED": 17,
        "NO_BASE": 18,
        "JUDGE_CHANGED": 19,
        "TAMPERED": 20,
    }
    assert [o.status for o in Outcome] == sorted(o.status for o in Outcome)
    green = {"IDENTICAL", "SAME", "FASTER", "NEW"}
    assert {o.name for o in Outcome if o.green} == green
    first = {"NO_BASELINE", "OTHER_DEVICE_OR_VERSION"}
    assert {o.name for o in Outcome if o.may_be_baseline} == green | first
    assert worst([]) is Outcome.SAME
    assert worst([Outcome.IDENTICAL, Outcome.IDENTICAL]) is Outcome.IDENTICAL
    assert worst([Outcome.SLOWER, Outcome.MISSING, Outcome.SAME]) is Outcome.MISSING


@pytest.mark.parametrize(
    ("times", "found"),
    [(1.0, "SAME"), (1.04, "SAME"), (1.06, "SLOWER"), (0.96, "SAME"), (0.9, "FASTER")],
)
def test_times_beyond_the_tolerance_with_quartiles_apart(times: float, found: str) -> None:
    assert outcome(entry(1.0), entry(times)).name == found


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((1.0, 0.9, 1.2), (1.3, 1.2, 1.4), "INCONCLUSIVE"),  # quartiles that touch
        ((1.0, 0.9, 1.19), (1.3, 1.2, 1.4), "SLOWER"),
        ((1.0, 0.9, 1.1), (0.8, 0.7, 0.9), "SAME"),
        ((1.0, 0.9, 1.1), (0.8, 0.7, 0.89), "FASTER"),
        ((1.05, 1.05, 1.05), (1.0, 1.0, 1.0), "SAME"),  # at the tolerance, either way
        ((1.0, 1.0, 1.0), (1.05, 1.05, 1.05), "SAME"),
    ],
)
def test_each_limit_of_a_ratio_and_of_quartiles_is_on_one_side(
    before: tuple[float, ...], after: tuple[float, ...], found: str
) -> None:
    def of(seconds: float, *quartiles: float) -> Entry:
        return entry(seconds, seconds_quartiles=list(quartiles))

    assert outcome(of(*before), of(*after)).name == found


def test_a_quartile_of_a_time_is_above_zero() -> None:
    def of(low: float) -> Entry:
        return entry(2.0, seconds_quartiles=[low, 3.0])

    assert outcome(of(5e-324), of(5e-324)) is Outcome.SAME
    assert outcome(of(0.0), of(0.0)) is Outcome.MISSING


def test_overlapping_quartiles_are_inconclusive_and_never_green() -> None:
    wide: dict[str, Any] = {"seconds_quartiles": [1.0, 1.4]}
    assert outcome(entry(1.0), entry(1.2, **wide)) is Outcome.INCONCLUSIVE
    assert not Outcome.INCONCLUSIVE.green
    assert "overlap" in text(entry(1.0), entry(1.2, **wide))
    assert outcome(entry(1.2, **wide), entry(1.0)) is Outcome.SAME


def test_a_wide_baseline_overlaps_too() -> None:
    """Above its median and below its upper quartile nothing is known to be slower."""
    wide: dict[str, Any] = {"seconds_quartiles": [0.9, 1.3]}
    assert outcome(entry(1.0, **wide), entry(1.2)) is Outcome.INCONCLUSIVE
    assert "overlap" in text(entry(1.0, **wide), entry(1.2))
    assert outcome(entry(1.0, **wide), entry(1.4)) is Outcome.SLOWER


ALLOWED = {
    **{"seconds": 1.05, "device_seconds": 1.05, "host_seconds": 1.25, "layouts": 1.10},
    **{"peak_bytes": 1.02, "live_bytes": 1.02, "kernels": 1.0, "copies": 1.0, "host_syncs": 1.0},
}


def test_no_more_is_allowed_than_was_said() -> None:
    assert TOLERANCES == ALLOWED


@pytest.mark.parametrize("metric", [m for m in ALLOWED if m != "layouts"])
def test_each_metric_is_gated_by_its_own_tolerance(metric: str) -> None:
    def of(value: float) -> Entry:
        values: dict[str, Any] = {metric: value}
        return replace(entry(**values), seconds_quartiles=None)

    allowed = TOLERANCES[metric]
    before = of(100)
    assert outcome(before, of(100)) is Outcome.SAME
    assert outcome(before, of(100 * allowed)) is Outcome.SAME
    slower = of(100 * allowed + 1)
    assert outcome(before, slower) is Outcome.SLOWER
    told = text(before, slower)
    assert told.startswith("SLOWER step/v1: ")
    assert f" {metric} {allowed + 0.01:.3f} times ({allowed:g} allowed)" in told


def test_what_is_zero_may_not_become_one() -> None:
    assert outcome(entry(copies=0), entry(copies=0)) is Outcome.SAME
    assert outcome(entry(copies=0), entry(copies=1)) is Outcome.SLOWER


def test_layouts_are_gated_one_by_one() -> None:
    before = op(strided=Ratio(1.0, 1.0, 1.0), transposed=Ratio(1.0, 0.9, 1.1))
    after = op(strided=Ratio(1.2, 1.2, 1.2), transposed=Ratio(1.05, 1.0, 1.1))
    (verdict,) = compare(record(before), record(after))
    assert {f.metric: f.outcome for f in verdict.figures} == {
        "seconds": Outcome.SAME,
        "layouts strided": Outcome.SLOWER,
        "layouts transposed": Outcome.SAME,
    }
    assert outcome(before, op(strided=Ratio(1.0, 1.0, 1.0))) is Outcome.MISSING


def test_compile_time_is_not_gated() -> None:
    assert outcome(entry(compile_seconds=1.0), entry(compile_seconds=9.0)) is Outcome.SAME


# -- missing, new -----------------------------------------------------------------------------


def test_missing_and_new_entries_and_metrics_are_never_green() -> None:
    found = compare(record(entry(name="a")), record(entry(name="b")))
    assert [(v.name, v.outcome.name) for v in found] == [("a", "MISSING"), ("b", "NO_BASELINE")]
    assert outcome(entry(peak_bytes=5), entry()) is Outcome.MISSING
    assert outcome(entry(), entry(peak_bytes=5)) is Outcome.NO_BASELINE


def test_what_ran_before_and_cannot_now_is_missing_with_the_reason() -> None:
    cannot = entry(None, cannot="no bf16")
    assert outcome(entry(), cannot) is Outcome.MISSING
    assert "no bf16" in text(entry(), cannot)
    assert outcome(entry(), entry(cannot="no bf16")) is Outcome.MISSING
    assert outcome(cannot, cannot) is Outcome.SAME
    assert outcome(cannot, entry()) is Outcome.NO_BASELINE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1.0, "1.0", None, True, [1]])
@pytest.mark.parametrize("side", ["before", "after"])
def test_what_is_no_measurement_is_never_green(value: Any, side: str) -> None:
    for bad in (entry(value), entry(value, seconds_quartiles=[1.0, 1.0])):
        sides = {"before": entry(), "after": entry(), side: bad}
        assert outcome(sides["before"], sides["after"]) is Outcome.MISSING
        assert "no measurement" in text(sides["before"], sides["after"])


@pytest.mark.parametrize(
    "quartiles", [[math.nan, 1.0], [1.0], [2.0, 1.0], [0.0, 1.0], "12", [1.0, math.inf]]
)
def test_quartiles_that_are_none_are_never_green(quartiles: Any) -> None:
    for pair in ((entry(), entry(seconds_quartiles=quartiles)),) * 2:
        assert outcome(*pair) is Outcome.MISSING
        assert outcome(*reversed(pair)) is Outcome.MISSING


def test_a_new_entry_must_be_a_measurement_too() -> None:
    (verdict,) = compare(record(), record(entry(math.nan)))
    assert verdict.outcome is Outcome.MISSING


# -- tolerances -------------------------------------------------------------------------------


def test_an_entry_declares_its_tolerance_and_a_wider_one_does_not_count_yet() -> None:
    before = entry(1.0, tolerances={"seconds": 1.1})
    assert outcome(before, entry(1.08, tolerances={"seconds": 1.1})) is Outcome.SAME
    assert outcome(before, entry(1.08)) is Outcome.SLOWER
    wider = entry(1.2, tolerances={"seconds": 1.5})
    assert outcome(before, wider) is Outcome.SLOWER
    assert "the baseline allows 1.1: 1.5 counts once it is recorded" in text(before, wider)
    assert "the baseline allows 1.05: 1.5 counts" in text(entry(), wider)
    assert "the baseline allows" not in text(before, before)


@pytest.mark.parametrize(
    "tolerances", [{"seconds": math.nan}, {"seconds": math.inf}, {"seconds": 0.9}, {"second": 2}]
)
def test_a_tolerance_that_is_none_is_never_green(tolerances: dict[str, Any]) -> None:
    assert outcome(entry(), entry(tolerances=tolerances)) is Outcome.MISSING
    with pytest.raises(ValueError, match="tolerance"):
        check_tolerances(entry(tolerances=tolerances))


# -- what is not gated ------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["peer", "floor"])
def test_peers_and_the_floor_are_shown_and_never_fail(role: str) -> None:
    assert outcome(entry(role=role), entry(9.0, role=role)) is Outcome.SAME
    assert "not gated: slower: seconds 9.000 times" in text(entry(role=role), entry(9.0, role=role))
    (lacking,) = compare(record(entry(role=role)), record())
    assert lacking.outcome is Outcome.SAME
    assert "missing: in the baseline, not in this run" in lacking.text


def test_ceilings_are_not_compared() -> None:
    fast, slow = (CeilingEntry(name="ceiling/copy", bytes_per_second=b) for b in (2.0, 1.0))
    assert compare(record(fast), record(slow)) == []


def test_a_benchmark_cannot_escape_by_calling_itself_a_peer() -> None:
    assert outcome(entry(), entry(9.0, role="peer")) is Outcome.SLOWER


# -- the baseline -----------------------------------------------------------------------------


def judged(candidate: Record, *stored: Record) -> list[str]:
    return [verdict.outcome.name for verdict in judge(candidate, stored)]


def test_the_baseline_is_the_newest_complete_clean_record_of_the_setting() -> None:
    slow, fast = record(entry(2.0)), record(entry(1.0))
    now = record(entry(2.0), commit="b" * 40 + "+dirty")
    assert judged(now, fast, slow) == ["SAME"]
    assert judged(now, slow, fast) == ["SLOWER"]
    for other in (
        replace(fast, complete=False),
        replace(fast, commit="c" * 40 + "+dirty"),
        replace(fast, group="other"),
        replace(fast, versions={"torch": "3.0"}),
        replace(fast, device="another card"),
    ):
        assert judged(now, slow, other) == ["SAME"], other


def test_without_a_baseline_the_reason_is_said() -> None:
    now = record(entry())
    assert judged(now) == ["NO_BASELINE"]
    assert judged(now, replace(now, commit="c" * 40 + "+dirty")) == ["NO_BASELINE"]
    assert judged(now, replace(now, commit="unknown")) == ["SAME"]
    versions = replace(now, versions={"torch": "1.0", "triton": "3"})
    (verdict,) = judge(now, [versions])
    assert verdict.outcome is Outcome.OTHER_DEVICE_OR_VERSION
    assert verdict.text.endswith("torch 1.0 -> 2.0, triton 3 -> none")
    (verdict,) = judge(now, [replace(now, device="another card")])
    assert verdict.outcome is Outcome.OTHER_DEVICE_OR_VERSION
    assert "another card; this is A Card" in verdict.text


def test_without_a_baseline_each_figure_that_is_none_is_told() -> None:
    bad = [entry(math.nan, "a"), entry(1.0, "b"), entry(math.inf, "c")]
    found = judge(record(*bad), [])
    assert [(v.name, v.outcome) for v in found[1:]] == [
        ("a", Outcome.MISSING),
        ("c", Outcome.MISSING),
    ]


def test_what_does_not_run_says_so_and_is_new_where_it_is_new() -> None:
    (new,) = compare(record(), record(entry(None, cannot="no bf16")))
    told = "does not run: no bf16"
    assert (new.outcome, new.text) == (Outcome.NO_BASELINE, told)
    empty = entry(None, cannot="no bf16")
    (same,) = compare(record(empty), record(empty))
    assert (same.outcome, same.text) == (Outcome.SAME, told)


def test_a_tolerance_of_one_allows_nothing_more() -> None:
    check_tolerances(entry(tolerances={"seconds": 1.0}))
    strict = entry(tolerances={"seconds": 1.0})
    assert outcome(strict, entry(1.03, tolerances={"seconds": 1.0})) is Outcome.SLOWER


def test_a_group_that_measured_nothing_is_missing() -> None:
    for stored in ([], [record()], [record(entry())]):
        assert "MISSING" in judged(record(), *stored)
