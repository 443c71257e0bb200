"""Steps on several ranks: what is measured, and what a record keeps of them."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tinyllama.bench.planner import points
from tinyllama.bench.scaling import SCALINGS, Job, JobResult, entries_of, groups
from tinyllama.harness.records.results import load
from tinyllama.model.llama import TinyLlama
from tools.result_tables import tracked

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
    return JobResult(link=250e9, ranks=2, seconds=times, facts=facts)


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


def test_the_planner_is_compared_with_steps_on_several_gpus(measured: JobResult) -> None:
    """By the links that their record measured, on the device whose ops were timed."""
    records = [load(path) for path in tracked("results/nvidia-h200/*.json")]
    records = [record for record in records if "scaling" not in record.group]
    alone = {point.workload: point for point in points(records)}
    entries: list[Any] = entries_of(JOB, measured)
    last = replace(records[-1], group="scaling-medium-bf16", entries=entries)
    every = {point.workload: point for point in points([*records, last])}
    assert every.keys() - alone.keys() == {"medium, 2 GPUs, weak", "medium, 2 GPUs, strong"}
    weak, strong = every["medium, 2 GPUs, weak"], every["medium, 2 GPUs, strong"]
    assert weak.recorded_seconds == 0.025
    assert weak.plan.gpus == strong.plan.gpus == 2
    assert weak.plan.tokens == 2 * alone["medium"].plan.tokens == 2 * strong.plan.tokens
    assert weak.plan.communication == pytest.approx(
        4 * TinyLlama(SCALINGS[1].base.shape.model).config.parameters / 250e9
    )


def test_a_machine_without_two_gpus_measures_none() -> None:
    assert groups(torch.device("cpu")) == []
