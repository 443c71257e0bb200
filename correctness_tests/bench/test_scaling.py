"""Steps on several ranks: what is measured, and what a record keeps of them."""

from typing import Any

import pytest
import torch

from tinyllama.bench.scaling import Job, JobResult, entries_of, groups

JOB = Job("medium-bf16", "v3")


@pytest.fixture
def measured() -> JobResult:
    seconds = {"one": 0.02, "weak": 0.025, "strong": 0.0125}
    facts: dict[str, dict[str, Any]] = {
        case: {"plan": "capture", "left_out": {}, "batch": 32 if case == "weak" else 16}
        for case in seconds
    }
    facts["weak"] |= {"collective_seconds": 0.005, "hidden_seconds": 0.004}
    times = {case: [value] * 8 for case, value in seconds.items()}
    return JobResult(ranks=2, seconds=times, facts=facts)


def test_efficiency_is_the_time_of_one_gpu_over_that_of_several(measured: JobResult) -> None:
    one, weak, strong = entries_of(JOB, measured)
    assert one.efficiency is None
    assert weak.efficiency == pytest.approx((0.8, 0.8, 0.8))
    assert strong.efficiency == pytest.approx((0.8, 0.8, 0.8))  # 1.6 times as fast on 2 GPUs
    assert (one.ranks, weak.ranks, strong.ranks) == (1, 2, 2)
    assert weak.samples_per_second == pytest.approx(32 / 0.025)
    assert [e.name for e in (one, weak)] == [
        f"scaling/medium-bf16/v3/{case}" for case in ("one", "weak")
    ]


def test_a_machine_without_two_gpus_measures_none() -> None:
    assert groups(torch.device("cpu")) == []
