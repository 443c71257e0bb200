"""What is compared without noise, and what is allowed: counts, compile times, accepted slowdowns,
tolerances that a change widens, and the device's own noise."""

import pytest

from correctness_tests.support.gate_fakes import (
    COUNTS,
    CPU,
    SECONDS,
    SIDES,
    Script,
    died,
    history,
    outcomes,
    wrong,
)
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.sequential_test import LOOKS
from tinyllama.harness.gate.waivers import Waiver
from tinyllama.harness.records.verdict import Outcome

COUNTED = ("peak_bytes", "kernels", "copies", "host_syncs")


def taken(script: Script, name: str = "a") -> int:
    return script.session.compared[name].blocks


# -- counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", COUNTED)
def test_a_higher_count_is_slower_and_a_lower_one_is_faster(metric: str) -> None:
    script = Script("a", "b")
    script.counts("a", **{metric: +1})
    script.ends(Outcome.SLOWER, f"{metric} ")
    assert not script.confirming, "there is no noise to be confirmed away"
    less = Script()
    less.counts("a", **{metric: -1})
    assert less.run()["a"].outcome is Outcome.FASTER


@pytest.mark.parametrize("value", [float("nan"), -1, None, True, "3"])
@pytest.mark.parametrize("side", SIDES)
def test_an_invalid_count_is_missing(side: str, value: object) -> None:
    script = Script()
    counts = {**COUNTS, "kernels": value}
    script.on(side, "counted", {name: n for name, n in counts.items() if n is not None})
    script.ends(Outcome.MISSING, "kernels was")


@pytest.mark.parametrize("blind", [SIDES, (BASE,), (CANDIDATE,)], ids=" ".join)
def test_a_profiler_that_sees_nothing_is_missing(blind: tuple[str, ...]) -> None:
    script = Script("a", "b")
    for side in blind:
        script.on(side, "counted", {**COUNTS, "kernels": 0, "copies": 0}, "a")
        script.on(side, "counted", {}, "b")
    verdicts = script.run()
    assert verdicts["a"].outcome is verdicts["b"].outcome is Outcome.MISSING
    assert "may this device be profiled?" in verdicts["a"].text
    assert script.status == 15
    copies = Script()  # an op may be a copy and nothing else
    for side in SIDES:
        copies.on(side, "counted", {**COUNTS, "kernels": 0, "copies": 1})
    assert copies.run()["a"].outcome is Outcome.SAME


@pytest.mark.parametrize(
    ("metric", "change"), [("kernels", -1), ("kernels", +1), ("peak_bytes", -1)]
)
def test_identical_code_hides_no_count_that_changed(metric: str, change: int) -> None:
    script = Script()
    script.alike("a", host_only=True)
    script.counts("a", **{metric: change})
    said = f"{metric} {COUNTS[metric]:,} -> {COUNTS[metric] + change:,}"
    script.ends(Outcome.SLOWER if change > 0 else Outcome.FASTER, said)


# -- the time to compile ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "times", "alike", "outcome"),
    [
        (6.4, 2, False, Outcome.SAME),
        (6.6, 2, False, Outcome.SLOWER),
        (6.6, 1, False, Outcome.SAME),  # it is measured again, with nothing else at work
        (0.5, 2, False, Outcome.SAME),
        (6.6, 2, True, Outcome.SLOWER),  # the same code hides nothing
    ],
)  # up to 3 * 1.5 + 2
def test_compiling_may_take_some_seconds_longer_and_no_more(
    seconds: float, times: int, alike: bool, outcome: Outcome
) -> None:
    script = Script()
    if alike:
        script.alike("a", host_only=True)
    script.on(CANDIDATE, "begin", seconds, when=lambda: script.launches <= times)
    slower = outcome is Outcome.SLOWER
    verdict = script.ends(outcome)
    assert ("compile_seconds 3.00 -> 6.60 s, allowed 6.50" in verdict.text) is slower


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("side", SIDES)
def test_an_invalid_compile_time_is_missing(side: str, seconds: float) -> None:
    script = Script()
    script.on(side, "begin", seconds)
    assert script.run()["a"].outcome is Outcome.MISSING


# -- accepted slowdowns -----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("metric", [DEVICE, HOST])
def test_an_accepted_amount_is_allowed_to_its_benchmark_and_metric(metric: str) -> None:
    script = Script("all", "some", "none")
    for name in script.names[BASE]:
        script.slower(name, **{metric: 1.2})
    script.accept("all", metric, 0.2)
    script.accept("some", metric, 0.1)
    verdicts = script.run(noise=history("all", "some", "none"))  # so that 0.5% is sure at once
    assert verdicts["all"].outcome is Outcome.SAME
    assert "20.0% accepted" in verdicts["all"].text
    assert verdicts["some"].outcome is verdicts["none"].outcome is Outcome.SLOWER


@pytest.mark.parametrize(("copies", "outcome"), [(2, Outcome.SAME), (3, Outcome.SLOWER)])
def test_counts_are_accepted_by_number(copies: int, outcome: Outcome) -> None:
    script = Script()
    script.on(BASE, "counted", {**COUNTS, "copies": 0})
    script.on(CANDIDATE, "counted", {**COUNTS, "copies": copies})
    script.accept("a", "copies", 2)
    script.ends(outcome)
    figure = script.session.compared["a"].settled("copies")
    assert figure is not None
    assert figure.text == f"copies 0 -> {copies}, 2 more accepted"


# -- missing and new --------------------------------------------------------------------------


def test_a_new_benchmark_is_verified_and_shown() -> None:
    script = Script("a")
    script.names[CANDIDATE] += ["new"]
    verdicts = script.run()
    assert outcomes(verdicts) == {"a": Outcome.SAME, "new": Outcome.NEW}
    assert script.status == 0
    assert script.session.report()["benchmarks"]["new"]["outcome"] == "NEW"
    requests = [request for request in script.requests if request[3][:1] == ("new",)]
    assert {side for _, side, _, _ in requests} == {CANDIDATE}
    draws = {args[1] for _, _, method, args in requests if method == "verify"}
    assert len(draws) == 2, "its results on two draws of values"
    rules = [script.session.compared["a"].series[DEVICE].rule.tests]
    assert rules == [2], "it takes no alpha from what is compared"


@pytest.mark.parametrize("how", ["renamed", "its counts", "accepted"])
def test_a_new_benchmark_is_green_only_where_nothing_is_missing(how: str) -> None:
    script = Script("a", "old")
    script.names[CANDIDATE] = ["a", "new"] if how != "its counts" else ["a", "old", "new"]
    if how == "its counts":
        script.on(CANDIDATE, "counted", {}, "a")
    if how == "accepted":
        script.accepted.append(Waiver("old", "why", "9.0", removed=True))
    verdicts = script.run()
    assert verdicts["new"].outcome is (Outcome.NEW if how == "accepted" else Outcome.NO_BASELINE)
    if how != "its counts":
        assert verdicts["old"].outcome is (Outcome.SAME if how == "accepted" else Outcome.MISSING)
    assert ("restore its name" in verdicts["new"].text) is (how != "accepted")
    assert script.session.report()["benchmarks"]["new"]["outcome"] == verdicts["new"].outcome.title
    assert script.status == (0 if how == "accepted" else 15)


@pytest.mark.parametrize(
    ("method", "answer", "outcome", "others"),
    [
        ("verify", wrong("new"), Outcome.WRONG_RESULT, Outcome.NOT_DECIDED),
        ("begin", died(), Outcome.NOT_JUDGED, Outcome.SAME),
    ],
)
def test_a_new_benchmark_that_is_not_right_is_not_green(
    method: str, answer: object, outcome: Outcome, others: Outcome
) -> None:
    script = Script("a")
    script.names[CANDIDATE] += ["new"]
    script.on(CANDIDATE, method, answer, "new")
    verdicts = script.run()
    assert outcomes(verdicts) == {"a": others, "new": outcome}
    assert script.status == outcome.status


def test_a_benchmark_of_one_interpreter_alone_is_not_new() -> None:
    script = Script("a")
    script.names[CANDIDATE] += ["new"]
    script.identity[BASE]["python"] = "3.10 /other"
    assert script.run(toolchains=True)["new"].outcome is Outcome.NO_BASELINE
    assert script.status == 12


def test_a_base_without_benchmarks_is_not_judged() -> None:
    script = Script("a")
    script.names[BASE] = []
    assert outcomes(script.run()) == {BASE: Outcome.NOT_JUDGED}


# -- tolerances -------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", SIDES)
@pytest.mark.parametrize("seed_of_noise", range(3))
def test_the_stricter_tolerance_of_both_sides_counts(strict: str, seed_of_noise: int) -> None:
    """Of a slowdown of 1.5% in noise, under which 2% cannot be excluded and 50% can."""
    script = Script(noise=0.05, seed=seed_of_noise)
    script.slower("a", device_seconds=1.015)
    for side in SIDES:
        script.slowdowns[side] = {DEVICE: 0.02 if side == strict else 0.5, HOST: 0.9}
    assert script.run()["a"].outcome is Outcome.INCONCLUSIVE
    for side in SIDES:
        script.slowdowns[side] = {DEVICE: 0.5, HOST: 0.9}
    assert script.run()["a"].outcome is Outcome.SAME


@pytest.mark.parametrize("lacking", SIDES)
def test_no_side_can_leave_a_metric_out(lacking: str) -> None:
    script = Script()
    del script.slowdowns[lacking][HOST]
    script.on(BASE, "turn", {DEVICE: 1.0, HOST: 1.0})
    script.on(CANDIDATE, "turn", {DEVICE: 1.0, HOST: 9.0})
    script.ends(Outcome.SLOWER, "host_seconds +800.00%")


def test_a_tolerance_under_the_margin_makes_its_benchmark_missing() -> None:
    script = Script("a", "b")
    for side in SIDES:
        script.states[side, "a"] = {DEVICE: 0.001, HOST: 0.1}
    script.ends(Outcome.MISSING, "tolerance 0.001")


# -- the device's own noise -------------------------------------------------------------------


@pytest.mark.long
def test_blocks_are_pooled_with_the_history_of_the_device() -> None:
    """What takes 8 blocks where nothing is known of the device, since 4 have 3 degrees of freedom,
    takes 4 where its spread is known."""
    script = Script()
    script.slower("a", device_seconds=1.04)
    script.run()
    assert taken(script) > LOOKS[0]
    assert script.run(noise=history("a"))["a"].outcome is Outcome.SLOWER
    assert taken(script) == LOOKS[0]


@pytest.mark.long
def test_alpha_is_shared_among_all_figures_of_the_merge() -> None:
    alone, among = Script(), Script(*(f"b{number}" for number in range(39)), "a")
    for script in (alone, among):
        script.run()
    rules = [script.session.compared["a"].series[DEVICE].rule for script in (alone, among)]
    assert [rule.tests for rule in rules] == [2, 80]


def test_a_cpu_is_judged_by_device_time_with_a_wider_margin() -> None:
    script = Script(device=CPU)
    script.slower("a", device_seconds=1.015)
    script.on(BASE, "turn", {DEVICE: SECONDS[DEVICE]})
    verdicts = script.run()
    assert verdicts["a"].outcome is Outcome.SAME
    rule = script.session.compared["a"].series[DEVICE].rule
    assert (rule.margin, rule.tolerance) == (0.02, 0.10)
    assert list(script.session.compared["a"].series) == [DEVICE]


def test_an_undecided_time_does_not_hide_a_slower_count() -> None:
    script = Script(noise=0.3)
    script.counts("a", kernels=1)
    script.ends(Outcome.SLOWER, "kernels", "neither certainly under")
