"""The ladder: the tiers' steps timed in turn, and the bars on their ratios.

The bars are those of the project for an H200 (small: 1.6 in tf32 and bf16; medium: 1.6 in
bf16, 1.25 in tf32). On other devices the ratios are shown and recorded, with no bar.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from perf_tests.workloads import ALL, DEVICE, ROUNDS, Group, Stepper, measured
from tinyllama.harness.clock import device_timer, interleaved, ratio
from tinyllama.harness.device import device_name
from tinyllama.tiers import TIERS

BARS = {
    ("NVIDIA H200", "small-tf32"): 1.6,
    ("NVIDIA H200", "small-bf16"): 1.6,
    ("NVIDIA H200", "medium-tf32"): 1.25,
    ("NVIDIA H200", "medium-bf16"): 1.6,
}


@pytest.fixture(scope="module", params=ALL, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Group, dict[str, Stepper]]]:
    """The steps of every tier for one workload and precision, all in memory at once."""
    with measured(request.param):
        yield request.param, {name: Stepper(request.param, name) for name in TIERS}


@pytest.mark.parametrize("tier", TIERS)
def test_step(group: tuple[Group, dict[str, Stepper]], tier: str, benchmark: Any) -> None:
    """One training step: forward, loss, backward, AdamW."""
    name, steppers = group
    stepper = steppers[tier]
    stepper.check()
    benchmark.group = str(name)
    benchmark._timer = device_timer
    benchmark.extra_info["plan"] = str(stepper.step.plan)
    benchmark.pedantic(stepper, rounds=ROUNDS[name.workload] // 2, warmup_rounds=2)


def test_v2_over_v1(group: tuple[Group, dict[str, Stepper]], record: Any) -> None:
    """V2 is faster than V1 by the bar, measured round by round in turn."""
    name, steppers = group
    for stepper in steppers.values():
        stepper.check()
    seconds = interleaved(steppers, DEVICE, ROUNDS[name.workload])
    for tier, stepper in steppers.items():
        times = sorted(seconds[tier])
        over = ratio(seconds["v1"], seconds[tier])
        record(
            f"step/{name}/{tier}",
            workload=name.workload,
            precision=name.precision,
            tier=tier,
            plan=str(stepper.step.plan),
            left_out=stepper.step.left_out,
            seconds=statistics.median(times),
            seconds_quartiles=[times[len(times) // 4], times[3 * len(times) // 4]],
            rounds=len(times),
            samples_per_second=stepper.batch_size / statistics.median(times),
            over_v1=[over.median, over.low, over.high],
        )
    bar = BARS.get((device_name(DEVICE), str(name)))
    measured = ratio(seconds["v1"], seconds["v2"])
    if bar is not None:
        assert measured.low >= bar, f"V2 over V1 is {measured}, the bar is {bar}"
