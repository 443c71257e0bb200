"""A training step has a time only when its gradients are right and it learns what V1 learns."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.bench.contender import Contender
from tinyllama.bench.floor import Floor
from tinyllama.bench.measure import FLOOR, StepGroup, empty_entry, entry_of
from tinyllama.bench.peers import CLIENT
from tinyllama.bench.peers.hugging_face_step import HuggingFaceStep
from tinyllama.bench.peers.with_ours import Mlp, Norm
from tinyllama.bench.steps import TierStep
from tinyllama.bench.workloads import Group

WHERE: dict[str, Any] = {"group": "tiny-fp32", "device": "cpu", "batch_size": 2, "seq_len": 16}
COUNT, CPU = 20, torch.device("cpu")


@pytest.mark.long
@pytest.mark.parametrize("tier", ["v1", "v2"])
def test_a_tier_is_verified_and_timed(tier: str) -> None:
    step = TierStep(tier=tier, **WHERE)
    assert step.verify() == {"gradients": COUNT, "parameters": COUNT}
    assert step.turn(2) > 0
    assert "joules_per_sample" in step.used(0.1)["unavailable"]


@pytest.mark.long
@pytest.mark.parametrize("tier", ["v1", "v2"])
def test_memory_and_copies_of_a_step_are_counted_on_a_cpu(tier: str) -> None:
    step = TierStep(tier=tier, **WHERE)
    uncaptured = step.uncaptured_memory()
    assert uncaptured["held_bytes"] == pytest.approx(4 * 4 * step.shape.parameters, rel=0.02)
    assert uncaptured["held_peak_bytes"] > 1.1 * uncaptured["held_bytes"]
    copies = step.launched()["copies"]
    assert copies > 0
    right_step, some = step.step, torch.zeros(3)

    def with_a_stray_copy(batch: torch.Tensor) -> torch.Tensor:
        some.clone()
        return right_step(batch)

    step.step = with_a_stray_copy
    assert step.launched()["copies"] == copies + 1


@pytest.mark.long
def test_a_peer_is_verified_in_our_layout() -> None:
    pytest.importorskip("transformers", reason="extra 'peers' is not installed")
    for attention in ("eager", "sdpa"):
        step = HuggingFaceStep(attention=attention, **WHERE)
        assert step.verify()["gradients"] == COUNT
    ours = TierStep(tier="v1", **WHERE)
    assert step.loss_series()[0] == pytest.approx(ours.loss_series()[0], rel=1e-5)


def test_a_client_is_their_model_with_our_ops() -> None:
    pytest.importorskip("transformers", reason="extra 'peers' is not installed")
    pytest.importorskip("triton")
    step = HuggingFaceStep(**CLIENT.arguments, **WHERE)
    ours = [type(module) for module in step.model.modules() if isinstance(module, Norm | Mlp)]
    layers = step.shape.num_layers
    assert (ours.count(Norm), ours.count(Mlp)) == (2 * layers + 1, layers)
    assert step._loss_of == step._our_loss
    assert step.verify()["gradients"] == COUNT


@pytest.mark.parametrize("name", ["embedding", "layers.0.w_q", "layers.1.mlp_norm"])
@pytest.mark.parametrize("fault", ["absent", "zero", "twice", "stale", "nan"])
def test_one_wrong_gradient_and_there_is_no_time(name: str, fault: str) -> None:
    step = TierStep(tier="v1", **WHERE)
    right = step.gradient_of
    stale = right(name)
    assert stale is not None
    stale = stale.clone()

    def wrong(other_name: str) -> torch.Tensor | None:
        gradient = right(other_name)
        if other_name != name or gradient is None:
            return gradient
        sick = gradient.clone()
        sick.view(-1)[0] = math.nan
        faults = {"absent": None, "zero": 0 * gradient, "twice": 2 * gradient, "stale": stale}
        return {**faults, "nan": sick}[fault]

    step.gradient_of = wrong  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=f"1 of {COUNT} parameters .* {name}"):
        step.verify()


def test_a_loss_that_is_not_finite_is_no_measurement() -> None:
    step = TierStep(tier="v1", **WHERE)
    step.losses.append(torch.tensor(float("nan")))
    with pytest.raises(AssertionError, match="not finite"):
        step.loss_series()


# -- what an entry holds ----------------------------------------------------------------------


def test_an_entry_has_the_rates_of_a_step_and_what_others_take_of_its_time() -> None:
    """tiny: 4 samples of 64 tokens; 6 operations for each of 422912 weights and token, and
    25559040 of attention."""
    measured = StepGroup(Group("tiny", "fp32"), CPU)
    for name, seconds in (("v1", 4.0), ("v2", 2.0), ("floor", 1.0)):
        measured.seconds[name] = [seconds] * 8
        measured.entries[name] = empty_entry(contender(name), measured.group)
    entry = entry_of(contender("v2"), measured, 1e9)
    assert (entry.seconds, entry.rounds) == (2.0, 8)
    assert entry.over == {"v1": (2.0,) * 3, "floor": (0.5,) * 3}
    for role, over in (("client", entry.over), ("peer", None)):
        assert entry_of(replace(contender("v2"), role=role), measured, 1e9).over == over
    assert (entry.baseline, entry.over_baseline) == ("v1", (2.0,) * 3)
    assert entry.floor_share == (0.5,) * 3
    assert entry.samples_per_second == 2.0
    flops = 6 * 422_912 * 256 + 25_559_040
    assert entry.mfu == pytest.approx(flops / 2.0 / 1e9)
    floor = entry_of(FLOOR, measured, 1e9)
    assert floor.seconds == 1.0
    assert (floor.over, floor.over_baseline, floor.floor_share, floor.mfu) == (None,) * 4


def test_what_cannot_run_has_an_entry_that_says_why() -> None:
    measured = StepGroup(Group("tiny", "fp32"), CPU)
    measured.cannot["far"] = "no such card"
    assert entry_of(contender("far"), measured, 1.0).cannot == "no such card"


def contender(name: str) -> Contender:
    return Contender(name, name, "tier", "nowhere:Nothing")


# -- the floor of a step does its products, all of them, and nothing else --------------------------


@pytest.fixture(scope="module")
def floor() -> Floor:
    return Floor(WHERE["group"], "cpu")


def counted(part: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        part()
    return counter.get_total_flops()


def test_its_products_are_those_of_a_step(floor: Floor) -> None:
    workload = Group.parse(WHERE["group"]).shape
    model = workload.model
    width = model.num_heads * model.head_dim
    scores = 6 * model.num_layers * workload.batch_size * width
    attention = scores * workload.seq_len * (workload.seq_len + 1)
    step = model.step_flops(workload.batch_size, workload.seq_len)
    assert counted(floor.parts["products"]) == step - attention
