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
    Verdict,
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


def verdict_of(before: Entry | None, after: Entry | None) -> Verdict:
    (verdict,) = compare(*(record(*([one] if one else [])) for one in (before, after)))
    return verdict


def outcome(before: Entry, after: Entry) -> Outcome:
    return verdict_of(before, after).outcome


def text(before: Entry, after: Entry) -> str:
    return str(verdict_of(before, after))


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
        "NOT_JUDGED": 17,
    }
    green = {"IDENTICAL", "SAME", "FASTER", "NEW"}
    assert {o.name for o in Outcome if o.green} == green
    first = {"NO_BASELINE", "OTHER_DEVICE_OR_VERSION"}
    assert {o.name for o in Outcome if o.may_be_baseline} == green | first
    assert worst([]) is Outcome.SAME
    assert worst([Outcome.IDENTICAL, Outcome.IDENTICAL]) is Outcome.IDENTICAL
    assert worst([Outcome.SLOWER, Outcome.MISSING, Outcome.SAME]) is Outcome.SLOWER


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


OFF = entry(None, cannot="no bf16")
EXACT, LOOSE, LOOSER = (dict[str, Any](tolerances={"seconds": m}) for m in (1.0, 1.1, 1.5))
WIDE = entry(seconds_quartiles=[0.9, 1.3])
NOT_RUN, ALLOWS = "does not run: no bf16", "the baseline allows 1.1: 1.5 counts once it is recorded"
PEERS = ("peer", "floor")


@pytest.mark.parametrize(
    ("before", "after", "found", "said"),
    [
        # What overlaps is inconclusive, and known to be slower only above the upper quartile.
        (entry(), entry(1.2, seconds_quartiles=[1.0, 1.4]), "INCONCLUSIVE", "overlap"),
        (entry(1.2, seconds_quartiles=[1.0, 1.4]), entry(), "SAME", ""),
        (WIDE, entry(1.2), "INCONCLUSIVE", "overlap"),
        (WIDE, entry(1.4), "SLOWER", ""),
        # What is zero may not become one. The time to compile is not gated.
        (entry(copies=0), entry(copies=0), "SAME", ""),
        (entry(copies=0), entry(copies=1), "SLOWER", ""),
        (entry(compile_seconds=1.0), entry(compile_seconds=9.0), "SAME", ""),
        # What is missing or new is never green, and says why.
        (entry(peak_bytes=5), entry(), "MISSING", ""),
        (entry(), entry(peak_bytes=5), "NO_BASELINE", ""),
        (entry(), OFF, "MISSING", "no bf16"),
        (entry(), entry(cannot="no bf16"), "MISSING", ""),
        (OFF, OFF, "SAME", NOT_RUN),
        (OFF, entry(), "NO_BASELINE", ""),
        (None, OFF, "NO_BASELINE", NOT_RUN),
        (None, entry(math.nan), "MISSING", ""),
        # A tolerance that is wider than the baseline's does not count yet.
        (entry(**LOOSE), entry(1.08, **LOOSE), "SAME", ""),
        (entry(**LOOSE), entry(1.08), "SLOWER", ""),
        (entry(**LOOSE), entry(1.2, **LOOSER), "SLOWER", ALLOWS),
        (entry(), entry(1.2, **LOOSER), "SLOWER", ALLOWS.replace("1.1:", "1.05:")),
        (entry(**EXACT), entry(1.03, **EXACT), "SLOWER", ""),
        # Peers and the floor never fail; no benchmark escapes by calling itself one.
        *((entry(role=r), entry(9.0, role=r), "SAME", "not gated: slower: ") for r in PEERS),
        *((entry(role=r), None, "SAME", "in the baseline, not in this run") for r in PEERS),
        (entry(), entry(9.0, role="peer"), "SLOWER", ""),
    ],
)
def test_the_verdict_on_a_pair_of_entries_and_what_it_says(
    before: Entry | None, after: Entry | None, found: str, said: str
) -> None:
    verdict = verdict_of(before, after)
    assert verdict.outcome.name == found
    assert said in str(verdict)
    assert ("the baseline allows" in str(verdict)) is ("the baseline allows" in said)


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


# -- missing, new -----------------------------------------------------------------------------


def test_missing_and_new_entries_are_told() -> None:
    found = compare(record(entry(name="a")), record(entry(name="b")))
    assert [(v.name, v.outcome.name) for v in found] == [("a", "MISSING"), ("b", "NO_BASELINE")]


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


# -- tolerances -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tolerances", [{"seconds": math.nan}, {"seconds": math.inf}, {"seconds": 0.9}, {"second": 2}]
)
def test_a_tolerance_that_is_none_is_never_green(tolerances: dict[str, Any]) -> None:
    check_tolerances(entry(**EXACT))
    assert outcome(entry(), entry(tolerances=tolerances)) is Outcome.MISSING
    with pytest.raises(ValueError, match="tolerance"):
        check_tolerances(entry(tolerances=tolerances))


# -- what is not gated ------------------------------------------------------------------------


def test_ceilings_are_not_compared() -> None:
    fast, slow = (CeilingEntry(name="ceiling/copy", bytes_per_second=b) for b in (2.0, 1.0))
    assert compare(record(fast), record(slow)) == []


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


def test_a_group_that_measured_nothing_is_missing() -> None:
    for stored in ([], [record()], [record(entry())]):
        assert "MISSING" in judged(record(), *stored)
