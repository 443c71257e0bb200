"""A training step has a time only when its gradients are right and it learns what V1 learns."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.bench import steps
from tinyllama.bench.contender import Contender
from tinyllama.bench.floor import Floor
from tinyllama.bench.measure import FLOOR, Measured, Run, empty_entry, entry_of
from tinyllama.bench.peers import CLIENT
from tinyllama.bench.peers.hugging_face_step import HuggingFaceStep
from tinyllama.bench.peers.with_ours import Mlp, Norm
from tinyllama.bench.steps import TierStep
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.clock import Reading
from tinyllama.harness.measure.energy import Energy
from tinyllama.harness.records.entries import entry_as_json

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


@pytest.mark.parametrize("tier", ["v1", "v2"])
def test_memory_and_copies_of_a_step_are_counted_on_a_cpu(tier: str) -> None:
    step = TierStep(tier=tier, **WHERE)
    held = step.held()
    assert held["held_bytes"] == pytest.approx(4 * 4 * step.shape.parameters, rel=0.02)
    assert held["held_peak_bytes"] > 1.1 * held["held_bytes"]
    copies = step.launched()["copies"]
    assert copies > 0
    kept, some = step.step, torch.zeros(3)

    def with_a_stray_copy(batch: torch.Tensor) -> torch.Tensor:
        some.clone()
        return kept(batch)

    step.step = with_a_stray_copy
    assert step.launched()["copies"] == copies + 1


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

    def wrong(asked: str) -> torch.Tensor | None:
        gradient = right(asked)
        if asked != name or gradient is None:
            return gradient
        sick = gradient.clone()
        sick.view(-1)[0] = math.nan
        made = {"absent": None, "zero": 0 * gradient, "twice": 2 * gradient, "stale": stale}
        return {**made, "nan": sick}[fault]

    step.gradient_of = wrong  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=f"1 of {COUNT} parameters .* {name}"):
        step.verify()


def run_of(measured: Measured, device: str = "cpu", workers: Any = None) -> Run:
    ended: Any = defaultdict(lambda: SimpleNamespace(close=lambda: None))
    run = Run(measured.group, torch.device(device), workers or ended)
    run.measured = measured
    return run


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
        measured.entries[name] = empty_entry(contender(name), measured.group)
        measured.losses[name] = losses
        measured.seconds[name] = [0.1] * 8
    run_of(measured)._must_learn()
    assert ("v2" in measured.seconds) is kept
    if not kept:
        entry = entry_of(contender("v2"), measured, 1.0)
        assert "it does not learn" in str(entry.cannot)
        assert entry.seconds is None


def test_where_v1_unlearns_nobody_has_a_time() -> None:
    """Nine tenths of what it learned are then less than nothing, and a flat loss is more."""
    measured = Measured(Group("tiny", "fp32"))
    for name, growth in (("v1", 0.1), ("v2", 0.0)):
        measured.entries[name] = empty_entry(contender(name), measured.group)
        measured.losses[name] = [7 + growth * step for step in range(20)]
        measured.seconds[name] = [0.1] * 8
    run_of(measured)._must_learn()
    assert measured.seconds == {}
    assert set(measured.failed) == {"v1", "v2"}


class Ticking:
    """A clock that only the parts of a step move on: what finds the batch, the step, and what keeps
    its loss."""

    def __init__(self, step: TierStep) -> None:
        self.ticks, self.seen = 0.0, [0.0]
        self._batches, self._step = step.batches, step.step
        step.queue = self  # type: ignore[assignment]
        step.batches = self  # type: ignore[assignment]
        step.step = self.step

    def now(self) -> float:
        return self.ticks

    def synchronize(self) -> None:
        pass

    def __getitem__(self, index: int) -> torch.Tensor:
        self.ticks += 100
        return self._batches[index]

    def step(self, batch: torch.Tensor) -> Any:
        self.ticks += len(self.seen)  # each step takes a second longer than the one before
        self.seen.append(self.ticks)
        loss = self._step(batch)
        return SimpleNamespace(detach=lambda: SimpleNamespace(clone=lambda: self._kept(loss)))

    def _kept(self, loss: torch.Tensor) -> torch.Tensor:
        self.ticks += 1000
        return loss.detach().clone()


def test_a_turn_times_steps_without_what_the_harness_does_around_them() -> None:
    step = TierStep(tier="v1", **WHERE)
    before = len(step.losses)
    Ticking(step)
    assert step.turn(3) == steps.UNTIMED + 2  # the second of three
    assert len(step.loss_series()) == before + steps.UNTIMED + 3


class Timed:
    """A worker whose step takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.turns = seconds, list[int]()

    def call(self, key: str, method: str, given: Any) -> float:
        if method == "turn":
            self.turns.append(given)
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1e-3, 2e-3), {"v1": [25] * 40, "v2": [25] * 40}),
        ((1e-3, 0.02), {"v1": [25] * 40, "v2": [5] * 40}),
        # A round takes 0.027 + (1 + 2) * 2.4 seconds, and 150 seconds are to be filled.
        ((1e-3, 2.4), {"v1": [25] * 20, "v2": [1] * 20}),
        ((1e-3, 9.0), {"v1": [25] * 8, "v2": [1] * 8}),
    ],
)
def test_many_rounds_of_few_steps_fill_the_time(
    seconds: tuple[float, float], expected: dict[str, list[int]]
) -> None:
    measured = Measured(Group("small", "bf16"))
    workers: dict[str, Any] = {}
    for name, step in zip(("v1", "v2"), seconds, strict=True):
        measured.entries[name] = empty_entry(contender(name), measured.group)
        workers[name] = Timed(step)
    run_of(measured, "cuda", workers).time()
    assert {name: worker.turns for name, worker in workers.items()} == expected
    assert [len(found) for found in measured.seconds.values()] == [len(expected["v1"])] * 2


def test_both_clocks_of_a_step_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([Reading(2.0, 30.0, True), Reading(1.0, 10.0, True), Reading(3.0, 20.0, True)])
    clock = SimpleNamespace(read=lambda call: next(readings))
    step = TierStep(tier="v1", **WHERE)
    monkeypatch.setattr(steps, "Clock", lambda queue, spin_seconds: clock)
    assert step.clocks(3) == {
        "device_seconds": 2.0,
        "device_seconds_quartiles": (1.0, 3.0),
        "host_seconds": 20.0,
        "host_seconds_quartiles": (10.0, 30.0),
    }


def test_the_energy_of_a_step_is_shared_by_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TierStep(tier="v1", **WHERE)
    monkeypatch.setattr(steps, "sensor", lambda device: object())
    monkeypatch.setattr(steps, "energy", lambda *args: Energy(6.0, 400.0, "counter"))
    assert step.used(0.1) == {"joules_per_sample": 3.0, "watts": 400.0, "energy_source": "counter"}


def test_of_the_floor_the_energy_alone_is_measured(
    monkeypatch: pytest.MonkeyPatch, floor: Floor
) -> None:
    monkeypatch.setattr(steps, "sensor", lambda device: object())
    found = Energy(6.0, 400.0, "counter")
    monkeypatch.setattr(steps, "energy", lambda call, *_: (call(), found)[1])
    measured = Measured(Group.parse(WHERE["group"]))
    measured.entries[FLOOR.name] = empty_entry(FLOOR, measured.group)
    measured.seconds[FLOOR.name] = [0.1] * 8
    asked = SimpleNamespace(
        call=lambda _, question, *rest: getattr(floor, question)(*rest), close=lambda: None
    )
    run_of(measured, workers=cast(Any, {FLOOR.name: asked})).look_closer()
    assert measured.failed == {}
    entry = entry_of(FLOOR, measured, 1e9)
    assert (entry.joules_per_sample, entry.watts, entry.kernels) == (1.5, 400.0, None)


class Asked:
    """A worker that answers everything with nothing, and notes what it is asked last."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def call(self, _: str, question: str, *__: object) -> Any:
        if question == "loss_series":
            return [float(-step) for step in range(20)]
        if question != "held":
            return {}
        self.said.append(f"{self.name} held")
        if self.name == "v2":
            raise WorkerError("no memory left")
        return {"held_bytes": 7}

    def close(self) -> None:
        self.said.append(f"{self.name} ended")


def test_uncaptured_steps_come_last_and_each_process_ends_before_the_next() -> None:
    """A second model beside all contenders did not fit on the GPU of `medium` in float32."""
    measured, said = Measured(Group("small", "fp32")), list[str]()
    names = ("hf", "v1", "v2", FLOOR.name)
    for name in names:
        measured.entries[name] = empty_entry(contender(name), measured.group)
        measured.seconds[name] = [0.1] * 8
    run_of(measured, workers={name: Asked(name, said) for name in names}).look_closer()
    assert said == [
        "hf held", "hf ended", "v1 held", "v1 ended", "v2 held", "v2 ended", "floor ended",
    ]  # fmt: skip
    assert measured.entries["v1"].held_bytes == 7
    assert set(measured.seconds) == {"hf", "v1", FLOOR.name}
    assert set(measured.failed) == {"v2"}


def test_the_documented_memory_is_in_float32() -> None:
    measured, said = Measured(Group("small", "bf16")), list[str]()
    measured.entries["v1"] = empty_entry(contender("v1"), measured.group)
    measured.seconds["v1"] = [0.1] * 8
    run_of(measured, workers={"v1": Asked("v1", said)}).look_closer()
    assert said == []


# -- what an entry holds ----------------------------------------------------------------------


def test_an_entry_has_the_rates_of_a_step_and_what_others_take_of_its_time() -> None:
    """tiny: 4 samples of 64 tokens; 6 operations for each of 422912 weights and token, and
    25559040 of attention."""
    measured = Measured(Group("tiny", "fp32"))
    for name, seconds in (("v1", 4.0), ("v2", 2.0), ("floor", 1.0)):
        measured.seconds[name] = [seconds] * 8
        measured.entries[name] = empty_entry(contender(name), measured.group)
    entry = entry_of(contender("v2"), measured, 1e9)
    assert (entry.seconds, entry.rounds) == (2.0, 8)
    assert entry.over == {"v1": (2.0,) * 3, "floor": (0.5,) * 3}
    for role, held in (("client", entry.over), ("peer", None)):
        assert entry_of(replace(contender("v2"), role=role), measured, 1e9).over == held
    assert (entry.baseline, entry.over_baseline) == ("v1", (2.0,) * 3)
    assert entry.floor_share == (0.5,) * 3
    assert (entry.samples_per_second, entry.tokens_per_second) == (2.0, 128.0)
    flops = 6 * 422_912 * 256 + 25_559_040
    assert entry.flops_per_second == flops / 2.0
    assert entry.mfu == pytest.approx(flops / 2.0 / 1e9)
    floor = entry_of(FLOOR, measured, 1e9)
    assert floor.seconds == 1.0
    assert not {"over", "over_v1", "floor_share", "mfu", "tokens_per_second"} & set(
        entry_as_json(floor)
    )


def test_what_failed_or_cannot_run_has_an_entry_that_says_why() -> None:
    measured = Measured(Group("tiny", "fp32"), cannot={"far": "no such card"})
    measured.failed["broken"] = WorkerError("it broke")
    found = [entry_of(contender(name), measured, 1.0) for name in ("far", "broken")]
    assert [entry.cannot for entry in found] == ["no such card", "it broke"]


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


def test_the_first_of_its_calls_in_a_turn_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, floor: Floor
) -> None:
    """It finds the caches as another process left them."""
    begun: list[str] = []
    floor.step = lambda: begun.append("step")
    monkeypatch.setattr("tinyllama.bench.floor.wall_seconds", lambda *_: float(len(begun)))
    assert floor.turn(3) == 1.0


def test_its_products_are_those_of_a_step(floor: Floor) -> None:
    workload = Group.parse(WHERE["group"]).shape
    model = workload.model
    width = model.num_heads * model.head_dim
    scores = 6 * model.num_layers * workload.batch_size * width
    attention = scores * workload.seq_len * (workload.seq_len + 1)
    step = model.step_flops(workload.batch_size, workload.seq_len)
    assert counted(floor.parts["products"]) == step - attention


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_operands_are_turned_in_memory_only(floor: Floor, turned: tuple[bool, bool]) -> None:
    a, b = floor._pair((3, 4, 5), turned)
    assert (a.shape, b.shape) == ((3, 4), (4, 5))
    assert [not x.is_contiguous() for x in (a, b)] == list(turned)


def test_the_fastest_layout_is_kept(monkeypatch: pytest.MonkeyPatch, floor: Floor) -> None:
    """As a GPU chooses: by the time that each takes."""
    monkeypatch.setattr(floor, "device", torch.device("meta"))
    monkeypatch.setattr(floor, "_random", lambda *shape: torch.empty(shape, device="meta"))
    monkeypatch.setattr(floor, "_graph", lambda product: product.args)
    monkeypatch.setattr(floor, "_seconds", lambda pair: 1.0 + pair[0].is_contiguous())
    assert floor._fastest_layout((3, 4, 5)) == (True, False)
