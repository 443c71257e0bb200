"""The judge's own clock bounds what a worker says that its calls took."""

import time

import pytest

from correctness_tests.support.gate_fakes import SECONDS, SIDES, Script
from tinyllama.harness.gate.subject import DEVICE
from tinyllama.harness.gate.turns import CALL
from tinyllama.harness.records.verdict import Outcome


def sleeping(seconds: float, said: float):  # type: ignore[no-untyped-def]
    def paced(name: str) -> float:
        time.sleep(seconds)
        return said

    return paced


@pytest.mark.parametrize("side", SIDES)
def test_a_clock_that_runs_slow_gives_no_time(side: str) -> None:
    """As a patched `perf_counter` that says an eighth."""
    script = Script("a", "b")
    script.on(side, "paced", sleeping(0.24, 0.03), "a")
    script.ends(Outcome.MISSING, f"the {side} says that 2 calls took 0.03 s")


@pytest.mark.parametrize("side", SIDES)
def test_a_clock_that_is_right_in_calls_and_wrong_in_turns_gives_no_time(side: str) -> None:
    script = Script("a", "b")
    script.on(side, "paced", sleeping(0.24, 0.24), "a")  # 30 ms for a call; a turn says 0.1
    script.ends(Outcome.MISSING, "by the judge's clock")


def test_what_prepares_calls_is_not_timed_with_them() -> None:
    script = Script("a")
    script.run()
    for side in SIDES:
        asked = [method for _, where, method, _ in script.asked if where == side]
        before = [asked[place - 1] for place, method in enumerate(asked) if method == "paced"]
        assert before
        assert set(before) == {"ready"}


@pytest.mark.parametrize(("call", "outcome"), [(0.03, Outcome.SAME), (1e-4, Outcome.MISSING)])
def test_a_device_time_below_the_hosts_is_held_to_the_longer_of_both(
    call: float, outcome: Outcome
) -> None:
    """Kernels of 5 us in a call that takes the host 30 ms."""
    script = Script("a")
    for side in SIDES:
        script.slowdowns[side] = {DEVICE: 0.02}
        script.on(side, "paced", sleeping(0.24, 0.24))
        script.on(side, "turn", {DEVICE: SECONDS[DEVICE], CALL: call})
    assert script.run()["a"].outcome is outcome
