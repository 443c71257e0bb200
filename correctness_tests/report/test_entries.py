"""Each type of a field from both sides of its limit, what entries tell of themselves, and each
number and text of a change point, exactly."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
import scipy.stats

from correctness_tests.support.sample_records import bare_step, plain_record, record
from tinyllama.harness.records import history, verdict
from tinyllama.harness.records.entries import (
    KINDS,
    CeilingEntry,
    CurveEntry,
    Entry,
    OpEntry,
    Quartiles,
    Ratio,
    StepEntry,
    are_numbers,
    baseline_of,
    entry_as_json,
    entry_from_json,
    is_interval,
    is_number,
)
from tinyllama.harness.records.history import Change, Reading, Series, told
from tinyllama.harness.records.outcome import Outcome

HUGE = sys.float_info.max
STEP: dict[str, Any] = {
    **{"name": "step/x", "kind": "step", "role": "tier", "workload": "small"},
    **{"precision": "fp32", "contender": "v1"},
}
CURVE: dict[str, Any] = {
    **{"name": "curve/x", "kind": "curve", "workload": "small", "contender": "v1"},
    **{"precision": "fp32", "steps": 3, "window": 2, "every": 1, "losses": [1.5, 1]},
}
OP: dict[str, Any] = {
    **{"name": "op/x", "kind": "op", "role": "ours", "op": "norm", "provider": "eager"},
    **{"case": "N2", "dtype": "fp32", "values": "normal", "passes": "forward"},
}

LACKING = {name: value for name, value in STEP.items() if name not in ("role", "precision")}
LISTS = "a list of finite numbers"

# By a field of each type: what it takes, what it does not, and what is said then.
TYPES: dict[str, tuple[dict[str, Any], list[Any], list[Any], str]] = {
    "plan": (STEP, ["", "a plan"], [3, True, ["a"], {}], "a text"),
    "queued": (OP, [True, False], [0, 1, "true"], "true or false"),
    "steps": (STEP, [0, -3, 7], [1.0, True, "1", math.inf], "a whole number"),
    "first_loss": (
        STEP,
        [0, -1.5, HUGE, -HUGE],
        [math.nan, math.inf, -math.inf, "1", True, 10**400],
        "a finite number",
    ),
    "seconds": (
        STEP,
        [0, 0.0, 1, HUGE],
        [-1, -5e-324, math.nan, math.inf, True, "1"],
        "a finite number of at least 0",
    ),
    "seconds_quartiles": (
        STEP,
        [[1, 1], [-1, 2.5]],
        [[2, 1], [1], [1, 2, 3], [1, math.nan], [1, True], "12", 3],
        "two numbers in order",
    ),
    "floor_share": (
        STEP,
        [[1, 2, 3], [3, 2, 1]],
        [[1, 2], [1, 2, 3, 4], [1, 2, math.inf], [1, 2, "3"], "123"],
        "a ratio with its interval, three numbers",
    ),
    "losses": (
        CURVE,
        [[], [1], [1, -2.5]],
        [[math.nan], 3, "1", [True]],
        "a list of finite numbers",
    ),
}


@pytest.mark.parametrize("field", TYPES)
def test_a_field_takes_what_is_of_its_type_and_nothing_else(field: str) -> None:
    data, right, wrong, words = TYPES[field]
    for value in right:
        found = entry_from_json("entry 3", {**data, field: value})
        kinds = {"seconds_quartiles": Quartiles, "floor_share": Ratio}
        made = getattr(found, field)
        assert made == (tuple(value) if field in kinds else value)
        assert isinstance(made, kinds.get(field, object))
        assert entry_from_json("", entry_as_json(found)) == found
    for value in wrong:
        text = f"entry 3 ({data['name']!r}): {field} is {value!r:.80}, not {words}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            entry_from_json("entry 3", {**data, field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("time_by", {"a": 1.0, "b": -1}, "time_by: b is -1, not a finite number of at least 0"),
        ("time_by", [1.0], "time_by is [1.0], not an object of fields"),
        ("time_by", {"a": 1.0, 3: 1.0}, "time_by is {'a': 1.0, 3: 1.0}, not an object of fields"),
        ("left_out", {"a": 1}, "left_out: a is 1, not a text"),
        ("over", {"v1": [1, 2]}, "over: v1 is [1, 2], not a ratio with its interval, three num"),
        ("over_v1", [1, 2], "over_v1 is [1, 2], not a ratio with its interval, three numbers"),
    ],
)
def test_what_an_object_of_fields_holds_is_checked(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"e ('step/x'): {message}")):
        entry_from_json("e", {**STEP, field: value})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "e is [1], not an object of fields"),
        ({"kind": "step"}, "e has no name"),
        ({"name": "", "kind": "step"}, "e has no name"),
        ({"name": "a"}, "e has no kind"),
        ({"name": "a", "kind": "steps"}, "e ('a'): unknown kind 'steps': use step, part, sweep, "),
        ({"name": "a", "kind": 3}, "e ('a'): unknown kind 3: use step, part, sweep, longest, "),
        ({"name": "a", "kind": ["step"]}, "e ('a'): unknown kind ['step']: use "),
        ({**STEP, "x": 1}, "e ('step/x'): unknown field 'x' of the kind step"),
        ({**STEP, "baseline": "v1"}, "unknown field 'baseline' of the kind step"),
        ({**CURVE, "over_v1": [1, 1, 1]}, "unknown field 'over_v1' of the kind curve"),
        ({**STEP, "over_a": [1, 1, 1], "over_b": [1, 1, 1]}, "unknown field 'over_b' of the kind"),
        (LACKING, "e ('step/x') has no role, precision"),
    ],
)  # fmt: skip
def test_an_entry_that_is_none_is_named_with_its_field(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        entry_from_json("e", data)


def test_a_ratio_over_a_baseline_is_stored_under_its_name() -> None:
    found = entry_from_json("e", {**STEP, "over_v1": [2, 1, 3]})
    assert isinstance(found, StepEntry)
    assert (found.baseline, found.over_baseline) == ("v1", Ratio(2, 1, 3))
    stored = entry_as_json(found)
    assert stored == {**STEP, "over_v1": Ratio(2, 1, 3)}
    assert baseline_of([bare_step("small-fp32", "v3"), found]) == "v1"
    assert baseline_of([bare_step("small-fp32", "v3")]) is None
    assert baseline_of([]) is None


def test_what_entries_tell_of_themselves() -> None:
    step, op, curve = (entry_from_json("e", data) for data in (STEP, OP, CURVE))
    assert isinstance(step, StepEntry)
    assert isinstance(op, OpEntry)
    assert isinstance(curve, CurveEntry)
    ceiling = CeilingEntry(name="ceiling/copy")
    assert [one.who for one in (step, op, curve, ceiling)] == ["v1", "eager", "v1", "ceiling/copy"]
    assert (step.group, step.call) == (("small", "fp32"), ("small", "fp32"))
    assert (op.group, op.call) == (("fp32",), ("norm", "N2", "fp32", "forward"))
    assert [one.held_by_tests for one in (step, op, curve, ceiling)] == [False, False, True, False]
    assert ceiling.ran
    assert not replace(ceiling, cannot="no").ran
    assert (step.ran, step.time) == (False, math.inf)
    timed = replace(step, seconds=0.0)
    assert (timed.ran, timed.time) == (True, 0.0)
    assert not replace(timed, cannot="no").ran
    roles = {role: replace(step, role=role).not_gated for role in ("tier", "peer", "floor", "")}
    assert roles == {"tier": None, "peer": "peer", "floor": "floor", "": None}
    assert ceiling.not_gated is None
    shares = [(3, 4), (0, 4), (3, 0), (None, 4), (3, None)]
    found = [replace(step, gradients=g, parameters=p).gradient_share for g, p in shares]
    assert found == [0.75, 0.0, None, None, None]
    assert str(Ratio(1.234, 1.0, 1.5)) == "1.23 [1.00, 1.50]"
    assert {name: kind.kind for name, kind in KINDS.items()} == {name: name for name in KINDS}


def test_numbers_and_intervals() -> None:
    assert [is_number(one) for one in (0, -1.5, HUGE, -HUGE)] == [True] * 4
    bad: list[Any] = [math.nan, math.inf, -math.inf, True, None, "1", 10**400, 1j]
    assert not any(map(is_number, bad))
    assert are_numbers([1, 2])
    assert are_numbers((1, 2), 2)
    assert are_numbers([])
    assert not any((are_numbers([1, 2], 1), are_numbers("12"), are_numbers([1, None])))
    assert is_interval([1, 1])
    assert is_interval((1, 2))
    assert not any((is_interval([2, 1]), is_interval([1]), is_interval([1, 2, 3])))


# -- change points --------------------------------------------------------------------------------


def series(metric: str = "seconds", **machines: Any) -> Series:
    """Four readings; those from the third on are of another commit."""
    readings = []
    for day, (letter, value) in enumerate(zip("aabb", (1, 1, 2, 3), strict=True), 1):
        date, machine = f"2030-01-0{day}T00:00:00Z", machines.get(letter, {})
        record = plain_record(commit=letter * 40, date=date, machine=machine)
        readings.append(Reading(record, value))
    return Series("step/v1", metric, tuple(readings))


def test_a_change_tells_its_place_levels_commits_and_machine() -> None:
    change = Change(series(), 2, 1.0, 2.5)
    assert change.percent == 150.0
    assert [one.commit[0] for one in change.records] == ["a", "b"]
    assert change.where == "record 3 of 4, 2030-01-03"
    assert change.levels == "1,000 ms → 2,500 ms (+150.0%)"
    assert change.commits == "aaaaaaaaaa..bbbbbbbbbb"
    assert change.machine == ""
    assert str(change) == (
        "step/v1 seconds: 1,000 ms → 2,500 ms (+150.0%) from record 3 of 4, 2030-01-03 on; "
        "aaaaaaaaaa..bbbbbbbbbb"
    )
    share = Change(series("floor_share"), 1, 2.0, 1.5)
    assert share.levels == "2.00 → 1.50 (-25.0%)"
    assert share.commits == "aaaaaaaaaa both: not the code"
    assert share.series.newest.date.startswith("2030-01-04")


def test_what_differs_between_two_machines_is_told() -> None:
    here = {"processor": "P", "cores": 8, "driver": "1", "memory_bytes": 5}
    there = {"processor": "P", "cores": 16, "system": "Linux 6", "memory_bytes": 6}
    change = Change(series(a=here, b=there), 2, 1.0, 2.0)
    told = "cores 8 → 16, system unknown → Linux 6, driver 1 → unknown"
    assert change.machine == told
    assert str(change).endswith(f"; {told}")


def test_the_probability_of_a_segmentation_is_that_of_an_f_test() -> None:
    logs = np.array([0.0, 0.1, 0.05, 1.0, 1.2, 1.1, 1.15, 0.4])
    parts = [[0.0, 0.1, 0.05], [1.0, 1.2, 1.1, 1.15, 0.4]]

    def scatter(values: list[float]) -> float:
        return sum((one - mean(values)) ** 2 for one in values)

    rest = sum(map(scatter, parts))
    gain = scatter([float(one) for one in logs]) - rest
    assert history._scatter(logs, [3]) == pytest.approx(rest)
    ratio = gain / ((rest + 8 * history.LEAST_SPREAD**2) / 6)
    p = float(scipy.stats.f.sf(ratio, 1, 6))
    ways = 3  # a level begins at the fourth, fifth or sixth of eight
    assert math.exp(history._log_p(logs, [3])) == pytest.approx(p * ways)
    logs = np.concatenate([logs, [0.5, 0.6]])
    rest = sum(map(scatter, [parts[0], parts[1][:4], [0.4, 0.5, 0.6]]))
    gain = scatter([float(one) for one in logs]) - rest
    ratio = (gain / 2) / ((rest + 10 * history.LEAST_SPREAD**2) / 7)
    p = float(scipy.stats.f.sf(ratio, 2, 7))
    assert math.exp(history._log_p(logs, [3, 7])) == pytest.approx(p * 3)


def test_how_much_was_searched_is_told() -> None:
    rest = ", each of 6 or more records; a series without a change shows one in at most 0.1% of "
    rest += "histories, if runs scatter alike. No exit status follows from it."
    begins = {
        (1, 0): "No change in one series",
        (2, 1): "1 change in 2 series",
        (3, 2): "2 changes in 3 series",
    }
    for (searched, found), text in begins.items():
        assert told(searched, found) == text + rest


def test_each_metric_of_what_ran_is_a_series() -> None:
    entry = replace(
        bare_step("small-fp32", "v3"),
        seconds=2.0,
        baseline="v1",
        over_baseline=Ratio(1.5, 1.0, 2.0),
        floor_share=Ratio(0.5, 0.5, 0.5),
    )
    others: list[Entry] = [
        replace(entry, name="zero", seconds=0.0, floor_share=Ratio(0.5, 0.4, 0.5)),
        replace(entry, name="not run", cannot="no"),
        CeilingEntry(name="ceiling"),
    ]
    days = (2, 1)
    records = [plain_record(entries=[entry, *others], date=f"2030-01-0{n}T00:00:00Z") for n in days]
    records.append(replace(records[0], complete=False))
    found = {(one.entry, one.metric): one for one in history.every_series(records)}
    assert list(found) == [
        (entry.name, "seconds"),
        (entry.name, "over_v1"),
        ("zero", "over_v1"),
        ("zero", "floor_share"),
    ]
    first = found[entry.name, "seconds"]
    assert [(one.value, one.record.date[9]) for one in first.readings] == [(2.0, "1"), (2.0, "2")]
    assert [one.value for one in found["zero", "floor_share"].readings] == [0.5, 0.5]
    other = replace(records[0], versions={"torch": "3"})
    assert len(history.every_series([*records, other])) == 2 * len(found)


def test_a_record_of_entries_that_tests_hold_lacks_nothing() -> None:
    curve, other = entry_from_json("e", CURVE), bare_step("small-fp32", "v3")
    held: list[list[Entry]] = [[curve], [curve, other], [other, curve]]
    for entries in held:
        assert verdict._nothing(record("g", entries)).outcome is Outcome.SAME
    lacking: list[list[Entry]] = [[], [other]]
    for entries in lacking:
        assert verdict._nothing(record("g", entries)).outcome is Outcome.MISSING
