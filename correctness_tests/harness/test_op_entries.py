"""What a record keeps of a timed op, and the bars that it is held to."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from correctness_tests.support.sample_records import op_target
from correctness_tests.support.tried import derived
from tinyllama.bench.measure_ops import OpCaseRun, bars, entries_of, held_layouts, layout_bars
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.clock import Reading
from tinyllama.harness.measure.op_contender import BOTH, FORWARD
from tinyllama.harness.records.entries import OpEntry, Ratio
from tinyllama.harness.records.targets import Standing

CEILINGS: Any = SimpleNamespace(copy=lambda: 1e9, product=lambda precision: 1e12)
SECONDS = {"eager": 4.0, "torch": 2.0, "liger": 1.5, "compile": 2.5, "triton": 1.0}
ROUNDS = 10


@pytest.fixture
def run() -> OpCaseRun:
    """One case of an op in ten rounds: seconds by provider, half of them forward. The sixth round
    of triton is slow."""
    op = Op(
        "toy",
        inputs={"x": Tensor("N", grad=True)},
        outputs={"y": "N"},
        cases=[Case(N=4)],
        timed=[Case(N=500_000_000)],
        bytes={"forward": lambda size, N: size * N, "backward": lambda size, N: size * N},
    )
    op.reference(lambda x: x)
    for name in ("torch", "triton", "liger"):
        op.provider(name)(lambda x: x)
    found = OpCaseRun(op, 0, "bf16")
    for name, seconds in SECONDS.items():
        rounds = [seconds * (1.25 if name == "triton" and i == 5 else 1) for i in range(ROUNDS)]
        found.readings[name] = {
            FORWARD: [Reading(s / 2, 0.1, True) for s in rounds],
            BOTH: [Reading(s, 0.1, name != "liger") for s in rounds],
        }
        found.facts[name] = {p: {"peak_bytes": 100, "kernels": 3} for p in (FORWARD, BOTH)}
    return found


def entries(run: OpCaseRun) -> dict[str, OpEntry]:
    """Of forward and backward, by provider."""
    return {entry.provider: entry for entry in entries_of(run, CEILINGS) if entry.passes == BOTH}


def over(entry: OpEntry) -> Mapping[str, Ratio]:
    assert entry.over
    return entry.over


def held_to(run: OpCaseRun, **changed: Any) -> list[str]:
    of_toy: dict[str, Any] = {"op": ("toy",), "passes": BOTH, "over": ("liger",), "device": "any"}
    bar = op_target(**{**of_toy, **changed})
    found = bars([bar], {"toy-N500000000": run}, entries_of(run, CEILINGS), "some card")
    return [one.text for one in found if one.standing is Standing.MISSED]


# -- entries ----------------------------------------------------------------------------------


def test_a_provider_of_ours_is_compared_with_every_other_round_by_round(run: OpCaseRun) -> None:
    found = over(entries(run)["triton"])
    assert set(found) == set(SECONDS) - {"triton"}
    assert found["torch"] == (2.0, 1.6, 2.0), "the median, and both ends of its 99% interval"
    assert over(entries(run)["torch"])["triton"] == (0.5, 0.5, 0.625)
    forward = [e for e in entries_of(run, CEILINGS) if e.passes == FORWARD]
    assert [over(e) for e in forward if e.provider == "triton"] == [found]


def test_a_peer_is_compared_with_eager_alone(run: OpCaseRun) -> None:
    for name in ("liger", "compile"):
        entry = entries(run)[name]
        assert (entry.role, entry.over, entry.baseline) == ("peer", None, "eager")
        assert entry.over_baseline
        assert entry.over_baseline.median == pytest.approx(4.0 / SECONDS[name])


def test_a_time_without_gaps_says_so(run: OpCaseRun) -> None:
    assert {name: entry.queued for name, entry in entries(run).items()} == {
        **dict.fromkeys(SECONDS),
        "liger": False,
    }
    readings = run.readings["torch"][BOTH]
    readings[-1] = replace(readings[-1], queued=False)
    assert entries(run)["torch"].queued is False, "one with a gap is enough"


def test_a_share_of_the_copy_bandwidth_is_of_both_passes_bytes(run: OpCaseRun) -> None:
    assert entries(run)["triton"].bytes == 2e9
    assert entries(run)["torch"].bandwidth_share == pytest.approx(1.0)


# -- bars -------------------------------------------------------------------------------------


def test_a_bar_is_held_at_the_worse_end_of_the_interval(run: OpCaseRun) -> None:
    assert held_to(run, at_least=1.2) == []
    (line,) = held_to(run, at_least=1.21)
    assert line == (
        "toy-N500000000, bf16, forward+backward: triton speed over liger >= 1.21: "
        "measured 1.500 [1.200, 1.500]"
    )
    assert held_to(run, at_least=1.21, judged_by="median") == []


def test_a_bar_over_several_is_over_the_fastest_that_ran(run: OpCaseRun) -> None:
    three = ("torch", "compile", "liger")
    assert held_to(run, over=three, at_least=1.2) == []
    assert len(held_to(run, over=three, at_least=1.3)) == 1
    del run.readings["liger"]
    run.cannot["liger"] = "it is not installed"
    assert held_to(run, over=three, at_least=1.3) == []


def test_a_bar_is_about_the_cases_that_it_names(run: OpCaseRun) -> None:
    never = {"at_least": 99.0}
    assert len(held_to(run, **never)) == 1
    assert len(held_to(run, **never, passes=FORWARD)) == 1
    assert len(held_to(run, **never, case=("N1", "N500000000"), dtype=())) == 1
    for other in ({"op": ("rope",)}, {"case": ("N1",)}, {"dtype": ("fp32",)}, {"passes": "back"}):
        assert held_to(run, **never, **other) == []


def test_shares_and_bytes_are_held_as_they_are(run: OpCaseRun) -> None:
    share = {"metric": "bandwidth_share", "over": None, "provider": "torch"}
    assert held_to(run, **share, at_least=0.99) == []
    assert len(held_to(run, **share, at_least=1.01)) == 1
    bytes_ = {"metric": "peak_bytes", "at_least": None, "at_most": 1.0}
    assert held_to(run, **bytes_) == []
    run.facts["triton"][BOTH]["peak_bytes"] = 101
    assert len(held_to(run, **bytes_)) == 1


def test_the_time_to_enqueue_a_call_is_held_by_the_medians(run: OpCaseRun) -> None:
    host = {"metric": "host_seconds", "at_least": None, "at_most": 0.7}
    (line,) = held_to(run, **host)
    assert line.endswith("triton host_seconds over liger <= 0.7: measured 1")
    slow = [Reading(1.0, 0.15, True) for _ in range(ROUNDS)]
    run.readings["liger"][BOTH] = slow
    assert held_to(run, **host) == []


def test_the_host_time_of_calls_in_a_row_is_of_the_last_pass(run: OpCaseRun) -> None:
    bar = {"metric": "repeated_host_seconds", "at_least": None, "at_most": 0.7}
    run.repeated = {"liger": [0.2, 0.2, 0.3], "triton": [0.12, 0.13, 0.15]}
    assert held_to(run, **bar) == []
    found = {(entry.provider, entry.passes): entry for entry in entries_of(run, CEILINGS)}
    assert found["triton", BOTH].repeated_host_seconds == 0.13
    assert found["triton", BOTH].repeated_host_seconds_quartiles == (0.12, 0.15)
    assert found["triton", FORWARD].repeated_host_seconds is None
    assert found["torch", BOTH].repeated_host_seconds is None
    run.repeated["triton"] = [0.15]
    (line,) = held_to(run, **bar)
    assert "repeated_host_seconds over liger <= 0.7: measured 0.75" in line


def test_what_cannot_run_here_is_no_bar_and_what_failed_is(run: OpCaseRun) -> None:
    del run.readings["liger"]
    run.cannot["liger"] = "it is not installed"
    assert held_to(run, at_least=99.0) == []
    del run.cannot["liger"]
    run.failed["liger"] = WorkerError("WrongResultError: y")
    (line,) = held_to(run)
    assert line.endswith("measured nothing that tells")
    assert len(held_to(run, over=("nobody",))) == 1, "a name that is no provider's"


def test_a_provider_that_cannot_run_here_misses_no_bar(run: OpCaseRun) -> None:
    """As kernels on a CPU, of a bar on every device."""
    del run.readings["triton"]
    run.cannot["triton"] = "it is interpreted here, and not timed"
    assert held_to(run, metric="kernels", over=None, at_least=None, at_most=1.0) == []


def test_kernels_of_a_pass_are_held_as_they_are(run: OpCaseRun) -> None:
    kernels = {"metric": "kernels", "over": None, "at_least": None, "at_most": 1.0}
    assert len(held_to(run, **kernels)) == 1, "they were not counted"
    run.facts["triton"][BOTH]["kernels"] = 1
    assert held_to(run, **kernels) == []
    run.facts["triton"][BOTH]["kernels"] = 2
    (line,) = held_to(run, **kernels)
    assert line.endswith("triton kernels <= 1: measured 2")


def test_one_that_cannot_run_here_excuses_no_bar_over_others_that_can(run: OpCaseRun) -> None:
    del run.readings["liger"]
    run.cannot["liger"] = "it is not installed"
    (line,) = held_to(run, over=("torch", "compile", "liger"), at_least=99.0)
    assert "triton speed over" in line


def test_a_provider_of_ours_without_a_time_misses_its_bars(run: OpCaseRun) -> None:
    del run.readings["triton"]
    run.failed["triton"] = WorkerError("WrongResultError: y")
    assert len(held_to(run)) == 1
    assert len(held_to(run, metric="bandwidth_share", over=None)) == 1


# -- layouts --------------------------------------------------------------------------------------

MEETS = {"strided": Ratio(1.8, 1.7, 1.9), "transposed": Ratio(1.4, 1.3, 1.5)}


def held(run: OpCaseRun, **layouts: Ratio) -> Any:
    """With a provider that has a backward of its own, and was timed on these layouts."""
    run.op.provider("manual")(derived(lambda x: None, lambda grads, kept, saved, needs: None))
    run.layouts = {name: {**MEETS, **layouts} for name in ("compile", "torch", "manual")}
    return held_layouts([run])


def test_a_backward_of_its_own_is_held_to_the_bars_of_layouts(run: OpCaseRun) -> None:
    found = held(run)
    assert found == {"toy-manual-N500000000": (run.op, MEETS)}, "what torch copies is not ours"
    assert {bar.standing for bar in layout_bars(found)} == {Standing.MET}
    assert len(layout_bars(found)) == len(MEETS)


def test_the_worse_end_of_a_layouts_interval_counts(run: OpCaseRun) -> None:
    missed, met = layout_bars(held(run, strided=Ratio(1.9, 1.8, 2.1)))
    assert (missed.standing, met.standing) == (Standing.MISSED, Standing.MET)
    assert missed.text == (
        "toy-manual-N500000000, strided: 1.90 [1.80, 2.10] times as long as contiguous, allowed 2 "
        "(the documents report 20 times of a step, 15 of 311 samples/s, for such inputs)"
    )


def test_layouts_that_were_not_measured_are_held_to_nothing(run: OpCaseRun) -> None:
    assert held_layouts([run]) == {}
