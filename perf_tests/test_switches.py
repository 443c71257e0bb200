"""What each part of V2 is worth: the step with that part switched off, in turn with V2 as it is."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from perf_tests.workloads import ALL, DEVICE, Group, Stepper, measured
from tinyllama.harness.clock import interleaved, ratio
from tinyllama.tiers import V2

SWITCHES = ("capture", "compile", *V2.switches)
GROUPS = [group for group in ALL if group.workload != "medium"]


@pytest.mark.slow("compiles V2 once more for each of its parts")
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_parts_of_v2(group: Group, record: Any) -> None:
    tiers = {"v2": V2, **{f"without {switch}": V2.without(switch) for switch in SWITCHES}}
    with measured(group):
        steppers = {name: Stepper(group, tier) for name, tier in tiers.items()}
        for stepper in steppers.values():
            stepper.check()
        seconds = interleaved(steppers, DEVICE, 30)
    for name, stepper in steppers.items():
        over = ratio(seconds[name], seconds["v2"])
        record(
            f"parts/{group}/{name}",
            workload=group.workload,
            precision=group.precision,
            tier=name,
            plan=str(stepper.step.plan),
            left_out=stepper.step.left_out,
            milliseconds=statistics.median(seconds[name]) * 1e3,
            over_v2=[over.median, over.low, over.high],
        )
