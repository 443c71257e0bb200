"""Steps on several ranks: what is measured, and what a record keeps of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama.bench.planner import points
from tinyllama.bench.scaling import SCALINGS, Found, Job, Part, cannot, entries_of, groups, jobs_of
from tinyllama.harness.records.entries import entry_as_json, entry_from_json
from tinyllama.harness.records.results import load
from tinyllama.model.llama import TinyLlama
from tinyllama.training.reduction import COPIES
from tools.result_tables import tracked

CPU = torch.device("cpu")


def job_and_found(reduce: str | None = None) -> tuple[Job, Found]:
    part = Part("v3", reduce=reduce)
    facts = {"alone": "v3", "contender": part.contender, "plan": "capture", "left_out": {}}
    seconds = {"one": 0.02, "weak": 0.025, "strong": 0.0125}
    names = {case: f"{part.alone if case == 'one' else part}/{case}" for case in seconds}
    found = Found(link=250e9, ranks=2)
    for case, name in names.items():
        found.seconds[name] = [seconds[case]] * 8
        found.facts[name] = {**facts, "batch": 32 if case == "weak" else 16, "losses": [7.0]}
    found.facts[names["weak"]] |= {"collective_seconds": 0.005, "hidden_seconds": 0.004}
    return Job("medium-bf16", [part]), found


@pytest.mark.parametrize(("reduce", "name"), [(None, "v3"), (COPIES, "v3-copies")])
def test_efficiency_is_the_time_of_one_gpu_over_that_of_several(
    reduce: str | None, name: str
) -> None:
    one, weak, strong = entries_of(*job_and_found(reduce))
    assert one.efficiency is None
    assert weak.efficiency == pytest.approx((0.8, 0.8, 0.8))
    assert strong.efficiency == pytest.approx((0.8, 0.8, 0.8))  # 1.6 times as fast on 2 GPUs
    assert (one.ranks, weak.ranks, strong.ranks) == (1, 2, 2)
    links = [entry.link_bytes_per_second for entry in (one, weak, strong)]
    assert links == [None, 250e9, 250e9]
    assert weak.samples_per_second == pytest.approx(32 / 0.025)
    assert [e.name for e in (one, weak)] == [
        f"scaling/medium-bf16/{name}/{case}" for case in ("one", "weak")
    ]
    for entry in (one, weak, strong):
        assert entry_from_json("it", entry_as_json(entry)) == entry


def test_a_job_and_what_it_found_are_read_as_they_were_written(tmp_path: Path) -> None:
    job, found = job_and_found(COPIES)
    job.write(tmp_path / "job.json")
    found.write(tmp_path)
    assert Job.read(tmp_path / "job.json") == job
    assert Found.read(tmp_path) == found


def test_the_planner_is_held_to_steps_on_several_gpus() -> None:
    """By the links that their record measured, on the device whose ops were timed."""
    every = [load(path) for path in tracked("results/nvidia-h200/*.json")]
    records = [one for one in every if "scaling" not in one.group]
    alone = {point.workload: point for point in points(records)}
    entries: list[Any] = entries_of(*job_and_found())
    last = replace(records[-1], group="scaling-medium-bf16", entries=entries)
    found = {point.workload: point for point in points([*records, last])}
    assert found.keys() - alone.keys() == {"medium, 2 GPUs, weak", "medium, 2 GPUs, strong"}
    weak, strong = found["medium, 2 GPUs, weak"], found["medium, 2 GPUs, strong"]
    assert weak.recorded_seconds == 0.025
    assert weak.plan.gpus == strong.plan.gpus == 2
    assert weak.plan.tokens == 2 * alone["medium"].plan.tokens == 2 * strong.plan.tokens
    assert weak.plan.communication == pytest.approx(
        4 * TinyLlama(SCALINGS[1].base.shape.model).config.parameters / 250e9
    )
    elsewhere = replace(last, device="another")
    assert len(points([*records, elsewhere])) == len(alone)


def test_ways_to_reduce_share_a_job() -> None:
    jobs = jobs_of(SCALINGS[1])
    assert [[part.contender for part in job.parts] for job in jobs] == [
        [tier, f"{tier}-{COPIES}"] for tier in ("v2", "v3", "v4")
    ]


def test_it_needs_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert groups(CPU) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert cannot(SCALINGS[0], torch.device("cuda")) == "scaling needs two GPUs, and there are 1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert groups(torch.device("cuda")) == [str(scaling) for scaling in SCALINGS]
