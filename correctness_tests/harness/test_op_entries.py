"""What a record keeps of a timed op, and the bars that it is held to."""

from collections.abc import Mapping
from typing import Any

import pytest

from correctness_tests.support.tried import derived
from tinyllama.bench.measure_ops import OpCaseRun, bars, bounded_layouts, entries_of, layout_bars
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.clock import Reading
from tinyllama.harness.measure.op_contender import BOTH, FORWARD
from tinyllama.harness.records.entries import OpEntry, Ratio
from tinyllama.harness.records.targets import SPEED, Standing, Target


class Ceilings:
    """A device of round numbers."""

    def copy(self) -> float:
        return 1e9

    def product(self, precision: str) -> float:
        return 1e12


CEILINGS: Any = Ceilings()
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
    result = OpCaseRun(op, 0, "bf16")
    for name, seconds in SECONDS.items():
        rounds = [seconds * (1.25 if name == "triton" and i == 5 else 1) for i in range(ROUNDS)]
        result.readings[name] = {
            FORWARD: [Reading(s / 2, 0.1, True) for s in rounds],
            BOTH: [Reading(s, 0.1, name != "liger") for s in rounds],
        }
        result.facts[name] = {p: {"peak_bytes": 100, "kernels": 3} for p in (FORWARD, BOTH)}
    return result


def entries(run: OpCaseRun) -> dict[str, OpEntry]:
    """Of forward and backward, by provider."""
    return {entry.provider: entry for entry in entries_of(run, CEILINGS) if entry.passes == BOTH}


def over(entry: OpEntry) -> Mapping[str, Ratio]:
    assert entry.over
    return entry.over


def missed(run: OpCaseRun, **changed: Any) -> list[str]:
    """What is said of a bar of triton over liger, other fields changed, where it is missed."""
    about = {"op": ("toy",), "dtype": ("bf16",), "passes": (BOTH,), **changed.pop("about", {})}
    bar: dict[str, Any] = {"metric": SPEED, "over": ("liger",), "direction": ">=", "bound": 1.0}
    target = Target(kind=OpEntry, who="triton", about=about, **{**bar, **changed})
    judged = bars([target], {"toy-N500000000": run}, entries_of(run, CEILINGS), "some card")
    return [bar.text for bar in judged if bar.standing is Standing.MISSED]


# -- entries ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_provider_of_ours_is_compared_with_every_other_round_by_round(run: OpCaseRun) -> None:
    result = over(entries(run)["triton"])
    assert set(result) == set(SECONDS) - {"triton"}
    assert result["torch"] == (2.0, 1.6, 2.0), "the median, and both ends of its 99% interval"
    assert over(entries(run)["torch"])["triton"] == (0.5, 0.5, 0.625)
    forward = [e for e in entries_of(run, CEILINGS) if e.passes == FORWARD]
    assert [over(e) for e in forward if e.provider == "triton"] == [result]


# -- bars -------------------------------------------------------------------------------------


def test_a_bar_is_judged_by_the_median_and_its_interval_is_shown(run: OpCaseRun) -> None:
    assert missed(run, bound=1.5) == []
    (line,) = missed(run, bound=1.51)
    assert line == (
        "toy-N500000000, bf16, forward+backward: triton speed over liger >= 1.51: "
        "measured 1.500 [1.200, 1.500]"
    )


@pytest.mark.long
def test_a_bar_over_several_is_over_the_fastest_that_ran(run: OpCaseRun) -> None:
    three = ("torch", "compile", "liger")
    assert missed(run, over=three, bound=1.5) == []
    assert len(missed(run, over=three, bound=1.6)) == 1
    del run.readings["liger"]
    run.cannot["liger"] = "it is not installed"
    assert missed(run, over=three, bound=1.6) == []


@pytest.mark.long
def test_what_cannot_run_here_is_no_bar_and_what_failed_is(run: OpCaseRun) -> None:
    del run.readings["liger"]
    run.cannot["liger"] = "it is not installed"
    assert missed(run, bound=99.0) == []
    del run.cannot["liger"]
    run.failed["liger"] = WorkerError("WrongResultError: y")
    (line,) = missed(run)
    assert line.endswith("measured nothing that tells")
    assert len(missed(run, over=("nobody",))) == 1, "a name that is no provider's"


# -- layouts --------------------------------------------------------------------------------------

MEETS = {"strided": Ratio(1.8, 1.7, 1.9), "transposed": Ratio(1.4, 1.3, 1.5)}


def with_layouts(run: OpCaseRun, **layouts: Ratio) -> Any:
    """With a provider that has a backward of its own, and was timed on these layouts."""
    run.op.provider("manual")(derived(lambda x: None, lambda grads, kept, saved, needs: None))
    run.layouts = {name: {**MEETS, **layouts} for name in ("compile", "torch", "manual")}
    return bounded_layouts([run])


def test_a_backward_of_its_own_is_held_to_the_bars_of_layouts(run: OpCaseRun) -> None:
    result = with_layouts(run)
    assert result == {"toy-manual-N500000000": (run.op, MEETS)}, "what torch copies is not ours"
    assert {bar.standing for bar in layout_bars(result)} == {Standing.MET}
    assert len(layout_bars(result)) == len(MEETS)


def test_the_median_of_a_layout_is_held_to_its_bar(run: OpCaseRun) -> None:
    over, within = layout_bars(with_layouts(run, strided=Ratio(2.1, 1.9, 2.2)))
    assert (over.standing, within.standing) == (Standing.MISSED, Standing.MET)
    assert over.text.startswith(
        "toy-manual-N500000000, strided: 2.10 [1.90, 2.20] times as long as contiguous, allowed 2"
    )
