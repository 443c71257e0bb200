"""A training step has a time only when its gradients are right and it learns what V1 learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perf_tests.measure import Measured, _Run, entry_of
from perf_tests.peers import Contender, HuggingFaceStep
from perf_tests.steps import TierStep
from perf_tests.workloads import Group
from tinyllama.harness.worker import WorkerError

WHERE: dict[str, Any] = {"group": "tiny-fp32", "device": "cpu", "batch_size": 2, "seq_len": 16}
COUNT = 20


@pytest.mark.parametrize("tier", ["v1", "v2"])
def test_a_tier_is_verified_and_timed(tier: str) -> None:
    step = TierStep(tier=tier, **WHERE)
    assert step.verify() == {"gradients": COUNT, "parameters": COUNT}
    assert step.turn(2) > 0
    assert step.clocks(2)["device_seconds"] > 0
    assert step.launched()["time_by"]["products"] > 0
    assert "joules_per_sample" in step.used(0.1)["unavailable"]
    assert len(step.loss_series()) == 1 + 1 + 4 + 2 + 1


def test_a_peer_is_verified_in_our_layout() -> None:
    pytest.importorskip("transformers", reason="extra 'peers' is not installed")
    for attention in ("eager", "sdpa"):
        step = HuggingFaceStep(attention=attention, **WHERE)
        assert step.verify()["gradients"] == COUNT
    ours = TierStep(tier="v1", **WHERE)
    assert step.loss_series()[0] == pytest.approx(ours.loss_series()[0], rel=1e-5)


@pytest.mark.parametrize("name", ["embedding", "layers.0.w_q", "layers.1.mlp_norm"])
@pytest.mark.parametrize("fault", ["absent", "zero", "twice", "stale"])
def test_one_wrong_gradient_and_there_is_no_time(name: str, fault: str) -> None:
    step = TierStep(tier="v1", **WHERE)
    right = step.gradient_of
    stale = right(name)
    assert stale is not None
    stale = stale.clone()

    def wrong(asked: str) -> torch.Tensor | None:
        gradient = right(asked)
        if asked != name or gradient is None:
            return gradient
        made = {"absent": None, "zero": 0 * gradient, "twice": 2 * gradient, "stale": stale}
        return made[fault]

    step.gradient_of = wrong  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=f"1 of {COUNT} parameters .* {name}"):
        step.verify()


def test_a_loss_that_is_not_finite_is_no_measurement() -> None:
    step = TierStep(tier="v1", **WHERE)
    step.losses.append(torch.tensor(float("nan")))
    with pytest.raises(AssertionError, match="not finite"):
        step.loss_series()


@pytest.mark.parametrize(("learned", "kept"), [(1.0, True), (0.95, True), (0.5, False), (0, False)])
def test_who_learns_less_than_v1_has_no_time(learned: float, kept: bool) -> None:
    falling = [7 - 0.1 * step for step in range(20)]
    other = [7 - learned * 0.1 * step for step in range(25)]
    measured = Measured(Group("tiny", "fp32"))
    for name, losses in (("v1", falling), ("v2", other)):
        measured.entries[name] = {"losses": losses}
        measured.seconds[name] = [0.1] * 8
    _Run(measured.group, torch.device("cpu"), {}, measured)._must_learn()
    assert ("v2" in measured.seconds) is kept
    if not kept:
        entry = entry_of(contender("v2"), measured, 1.0)
        assert "it does not learn" in entry["cannot"]
        assert "seconds" not in entry


def test_what_failed_or_cannot_run_has_an_entry_that_says_why() -> None:
    measured = Measured(Group("tiny", "fp32"), cannot={"far": "no such card"})
    measured.failed["broken"] = WorkerError("it broke")
    found: list[Any] = [entry_of(contender(name), measured, 1.0) for name in ("far", "broken")]
    assert [entry["cannot"] for entry in found] == ["no such card", "it broke"]


def contender(name: str) -> Contender:
    return Contender(name, name, "tier", "nowhere:Nothing")
