"""What only a step with fused blocks has: rounded weights, early updates, and a plan.

The kernels are those of the op `stack`, which the suites of `correctness_tests/ops` hold.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.declare.registry import providers_restored
from tinyllama.harness.kernels.configs import Config, asked
from tinyllama.harness.kernels.launch import dependent, recorded
from tinyllama.harness.kernels.placed import rounded
from tinyllama.harness.kernels.precision import narrowed
from tinyllama.harness.kernels.streams import Side
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import WORKLOADS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import AdamW, RoundedWeights, counted_apart
from tinyllama.model.tiers import V3, V4, StepPlan
from tinyllama.ops.stack import launches, receiving, stack
from tinyllama.ops.stack.configs import BESIDE, PLAN
from tinyllama.training.step import TrainStep, products

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
CONFIG = TrainConfig(batch_size=2, seq_len=4, precision="bf16", learning_rate=1e-2)
TOKENS = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))


def make_step(device: torch.device, plan: StepPlan | None = None, **changes: Any) -> TrainStep:
    model = TinyLlama(SHAPE, V4).to(device)
    return TrainStep(model, replace(CONFIG, **changes), plan)


def train(step: TrainStep, steps: int = 3) -> list[float]:
    tokens = TOKENS.to(step.device)
    step.prepare(warm_up=1)
    return [step(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(steps)]


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- rounded weights ------------------------------------------------------------------------------


def test_the_optimizer_writes_what_a_cast_would(device: torch.device) -> None:
    step = make_step(device)
    train(step)
    assert step.optimizer.copies is not None
    for parameter, low in zip(step.optimizer.parameters, step.optimizer.copies, strict=True):
        assert torch.equal(low, parameter.detach().to(torch.bfloat16))


def test_a_weight_that_is_changed_by_hand_is_rounded_again(device: torch.device) -> None:
    step, other = make_step(device), make_step(device)
    tokens = TOKENS.to(device)
    train(step, 1)
    before = step(tokens[:, :-1], tokens[:, 1:]).item()
    step.model.load_state_dict(other.model.state_dict())
    step.optimizer.reset()
    found = step(tokens[:, :-1], tokens[:, 1:]).item()
    assert found == train(other, 1)[0] != before


def test_only_a_change_from_elsewhere_is_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update keeps the copies by itself: no step casts a weight."""
    step = make_step(torch.device("cpu"))
    monkeypatch.setattr(RoundedWeights, "_write", wrote := Mock())
    train(step)
    assert wrote.call_count == 2  # for `prepare`, and for what it restored


def test_without_a_refresh_a_stale_weight_would_be_read(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test above sees what it is for."""
    step = make_step(device)
    tokens = TOKENS.to(device)
    train(step, 1)
    before = step(tokens[:, :-1], tokens[:, 1:]).item()
    monkeypatch.setattr(RoundedWeights, "refresh", lambda self: None)
    with torch.no_grad():
        for name, parameter in step.model.named_parameters():
            if name.endswith("w_down"):
                parameter.mul_(5)
    stale = step(tokens[:, :-1], tokens[:, 1:]).item()
    assert abs(stale - before) < 0.5  # the matrices were those from before


@pytest.mark.parametrize(("copied", "counters"), [(False, 1), (True, 3 * 9 + 2)])
def test_a_change_of_any_parameter_is_seen(
    copied: bool, counters: int, device: torch.device
) -> None:
    """By the one counter of a model's parameters; a copy's have one each."""
    model = TinyLlama(SHAPE, V4).to(device)
    model = copy.deepcopy(model).float() if copied else model
    step = TrainStep(model, CONFIG)
    assert step.rounded is not None
    assert step.optimizer.copies is not None
    assert len(step.rounded._counted) == counters
    step.rounded.refresh()
    for parameter, low in zip(step.optimizer.parameters, step.optimizer.copies, strict=True):
        with torch.no_grad():
            parameter.add_(1)
        assert not torch.equal(low, parameter.detach().to(torch.bfloat16))
        step.rounded.refresh()
        assert torch.equal(low, parameter.detach().to(torch.bfloat16))


def test_only_parameters_of_a_stack_count_together() -> None:
    """Without one, memory mode ``small`` changes some between a forward and a backward pass."""
    for tier, counters in ((V3, 3 * 9 + 2), (V4.with_memory("small"), 3 * 9 + 2), (V4, 1)):
        assert len(counted_apart(TinyLlama(SHAPE, tier).double().parameters())) == counters


def test_a_copy_is_offered_for_views_of_its_master_alone() -> None:
    step = make_step(torch.device("cpu"))
    assert step.rounded is not None
    step.rounded.refresh()
    w = step.model.get_parameter("layers.1.w_o")
    with step.rounded.offered():
        low = rounded.of(w, torch.bfloat16)
        assert low is not None
        assert torch.equal(low, w.detach().to(torch.bfloat16))
        assert rounded.of(w, torch.float16) is None
        assert rounded.of(w.detach().clone(), torch.bfloat16) is None
        assert rounded.of(w.detach().view(torch.bfloat16), torch.bfloat16) is None
    assert rounded.of(w, torch.bfloat16) is None


def test_a_product_reads_the_copy_and_its_gradient_goes_to_the_weight() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    master, low = weight.detach().flatten(), torch.full((12,), 2.0, dtype=torch.bfloat16)
    with rounded(master, low):
        read = narrowed(weight, torch.bfloat16)
    assert torch.equal(read, low.view(4, 3))
    read.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert torch.equal(weight.grad, torch.ones(4, 3))
    assert torch.equal(narrowed(weight, torch.bfloat16), weight.to(torch.bfloat16))


# -- a batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["windows", "spread windows", "turned windows", "apart", "swapped"])
def test_a_batch_is_loaded_wherever_it_lies(way: str) -> None:
    step = make_step(torch.device("cpu"))
    batch = torch.arange(10).view(2, 5)
    tokens, targets = batch[:, :-1], batch[:, 1:]
    if way == "swapped":
        tokens, targets = targets, tokens
    if "windows" in way:
        if way == "spread windows":
            batch = torch.arange(40).view(4, 10)[1::2, 1:].fill_(-1)[:, ::2].copy_(batch)
        elif way == "turned windows":
            batch = batch.T.contiguous().T
        step._load(batch, None)
    else:
        step._load(tokens, targets)
    assert torch.equal(torch.cat(step.tokens), tokens)
    assert torch.equal(torch.cat(step.targets), targets)


@pytest.mark.parametrize(
    ("shapes", "named"),
    [([(2, 4)], r"windows of shape \(2, 4\).*\(2, 5\)"), ([(2, 4), (2, 5)], r"batch.*\(2, 5\)")],
)
def test_a_batch_of_another_shape_is_refused(shapes: list[tuple[int, int]], named: str) -> None:
    step = make_step(torch.device("cpu"))
    with pytest.raises(ValueError, match=named):
        step(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))


# -- updates beside the backward pass --------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_overlapped_step_gives_the_same_bits(device: torch.device, precision: str) -> None:
    apart = replace(V4.plan(device.type), overlap=False, capture=False)
    steps = [make_step(device, plan, precision=precision) for plan in (None, apart)]
    assert [step.plan.overlap for step in steps] == [True, False]
    losses = [train(step) for step in steps]
    assert losses[0] == losses[1]
    assert same(*map(weights, steps))
    assert same(*([*step.optimizer.tensors().values()] for step in steps))


def test_each_block_is_updated_once_its_gradients_are_final(device: torch.device) -> None:
    """The last block first, with the gradients that the step then has."""
    step, seen = make_step(device, StepPlan()), []
    tokens = TOKENS.to(device)

    def receive(layer: int, make: Callable[[], None], gradients: dict[str, torch.Tensor]) -> None:
        make()
        seen.append((layer, {name: gradient.clone() for name, gradient in gradients.items()}))

    with receiving(receive):
        step(tokens[:, :-1], tokens[:, 1:])
    assert [layer for layer, _ in seen] == [2, 1, 0]
    for layer, gradients in seen:
        for name, gradient in gradients.items():
            found = step.model.get_parameter(f"layers.{layer}.{name}").grad
            assert found is not None
            assert torch.equal(gradient, found)


class Stream:
    """Stands for a stream of a GPU: what it waited for."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


def test_what_a_branch_reads_lives_until_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the memory of block 0's gradients would be given to kernels that run beside."""
    main, branch = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    side = Side(torch.device("cpu"))
    side._stream = branch  # type: ignore[assignment]
    read = torch.zeros(1)
    alive = weakref.ref(read)
    with side.branch(keep=read):
        assert branch.waited == [main]
    del read
    assert alive() is not None
    side.join()
    assert alive() is None
    assert main.waited == [branch]
    side.join()  # nothing to wait for
    assert main.waited == [branch]


def test_what_runs_beside_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of the step, each update, and the gradients of the first block, which keep what
    they read. Those of the others are made before the branch begins."""
    step, seen, weight_gradients = make_step(torch.device("cpu")), [], launches.weight_gradients

    @contextlib.contextmanager
    def branch(self: Side, keep: object = None) -> Iterator[None]:
        seen.append("begins" if keep is None else "begins, keeps")
        yield
        seen.append("ends")

    def noted(threes: Any, *, turned: bool) -> None:
        seen.append("makes")
        weight_gradients(threes, turned=turned)

    monkeypatch.setattr(Side, "branch", branch)
    monkeypatch.setattr(launches, "weight_gradients", noted)
    step(TOKENS[:, :-1], TOKENS[:, 1:])
    counted, first = ["begins, keeps", "ends"], ["begins, keeps", "makes", "ends"]
    assert seen == counted + 2 * ["makes", "begins", "ends"] + first


def test_without_overlap_the_gradients_of_each_block_are_made_and_reduced() -> None:
    """Those of the first block too, which an overlapped step makes on the side branch."""
    step, make = make_step(torch.device("cpu"), StepPlan()), Mock()
    step._reduction = reduction = Mock()
    for layer in (2, 1, 0):
        step._receive(layer, make, {"w_o": torch.zeros(1)})
        assert make.call_count == reduction.reduce.call_count == 3 - layer


def test_the_rest_is_updated_behind_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is on the side branch: the current stream has to wait for it."""
    step, seen = make_step(torch.device("cpu")), []
    update_rest = AdamW.update_rest

    def rest(self: AdamW) -> None:
        seen.append("rest")
        update_rest(self)

    monkeypatch.setattr(Side, "mark", lambda self: "the count")
    monkeypatch.setattr(Side, "wait", lambda self, point: seen.append(point))
    monkeypatch.setattr(AdamW, "update_rest", rest)
    step(TOKENS[:, :-1], TOKENS[:, 1:])
    assert seen == ["the count", "rest"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_grad_norm": 1.0}, "clipped gradients wait for the norm of all"),
        ({"accumulate": 2}, "accumulated gradients wait for the last micro-batch"),
        ({"precision": "fp16"}, "fp16 waits for gradients that are not finite"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_where_gradients_must_wait_so_do_updates(setting: dict[str, Any], said: str) -> None:
    cpu = torch.device("cpu")
    step = make_step(cpu, **setting)
    assert not step.plan.overlap
    assert step.left_out["overlap"] == said
    with pytest.raises(ConfigError, match=said):
        make_step(cpu, StepPlan(overlap=True), **setting)
    with pytest.raises(ConfigError, match="the blocks of this tier are not one op"):
        TrainStep(TinyLlama(SHAPE, V3), CONFIG, StepPlan(overlap=True))


def test_where_the_table_says_so_one_update_comes_at_the_end(device: torch.device) -> None:
    """Not for a plan that is given, nor for blocks one by one, which have no update beside them."""
    beside = train(make_step(device))
    key: dict[str, Any] = {"rows": 8, "width": 16, "kind": "16bit"}
    with BESIDE.force(Config(ON=0), **key):
        step = make_step(device)
        assert "one update at the end is faster" in step.left_out["overlap"]
        assert not step.plan.overlap
        assert make_step(device, replace(V4.plan("cpu"), capture=False)).plan.overlap
        with PLAN.force(Config(FUSED=0), **key):
            assert make_step(device).plan.overlap
        assert train(step) == beside


@pytest.mark.parametrize(("precision", "kind"), [("bf16", "16bit"), ("fp32", "fp32")])
def test_the_tables_are_asked_for_what_a_step_multiplies(precision: str, kind: str) -> None:
    """Not for those of its parameters, which are float32 in each."""
    with asked() as keys:
        make_step(torch.device("cpu"), precision=precision)(TOKENS)
    found = {space: key for (space, _), key in keys.items() if "width" in key}
    spaces = ["stack.beside", "stack.plan", *(["stack.turned"] if precision == "fp32" else [])]
    key = {"rows": 8, "width": 16, "kind": kind}
    assert sorted(found) == spaces
    assert all(one == key for one in found.values())


def test_in_fp16_gradients_are_unscaled_before_an_update() -> None:
    moments = []
    for precision in ("fp32", "fp16"):
        step = make_step(torch.device("cpu"), precision=precision)
        step.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == "fp16")
        step(TOKENS)
        moments.append(torch.cat([moment.flatten() for moment in step.optimizer.exp_avg]))
    assert moments[0].any()
    assert (moments[1] - moments[0]).norm() < 0.02 * moments[0].norm()


def test_a_step_whose_loss_is_not_finite_changes_nothing(device: torch.device) -> None:
    step = make_step(device)
    train(step, 1)
    with torch.no_grad():
        step.model.final_norm[0] = torch.nan
    before, tokens = weights(step), TOKENS.to(device)
    step(tokens[:, :-1], tokens[:, 1:])
    assert same(*([w.nan_to_num() for w in several] for several in (before, weights(step))))


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [None, "single", "out+down+attention_gradient"])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_repeated_a_captured_step_gives_equal_bits(
    plan: str | None, precision: str, gpu: torch.device
) -> None:
    """Of the workload `small`, 50 times from one state: loss, gradients, parameters, moments."""
    if reason := cannot(precision, gpu) or cannot("cooperative", gpu):
        pytest.skip(reason)
    shape = WORKLOADS["small"]
    config = TrainConfig(
        batch_size=shape.batch_size, seq_len=shape.seq_len, precision=precision, learning_rate=1e-3
    )
    generator = torch.Generator().manual_seed(0)
    size = (config.batch_size, config.seq_len + 1)
    tokens = torch.randint(shape.model.vocab_size, size, generator=generator).to(gpu)
    with products(precision, gpu), providers_restored([stack]):
        step = TrainStep(TinyLlama(shape.model, V4.with_plan(plan)).to(gpu), config)
        step.prepare()
        assert step.graphs
        state = [*step.optimizer.parameters, *step.optimizer.tensors().values()]
        before = [tensor.detach().clone() for tensor in state]
        first: list[torch.Tensor] = []
        for repeat in range(50):
            with torch.no_grad():
                for tensor, copy in zip(state, before, strict=True):
                    tensor.copy_(copy)
            step(tokens)
            gradients = [parameter.grad for parameter in step.optimizer.parameters]
            found = [t.detach().clone() for t in (*state, *gradients, step.loss) if t is not None]
            assert len(found) == len(state) + len(gradients) + 1
            first = first or found
            assert same(found, first), f"repeat {repeat} differs"
    assert not same(first[: len(before)], before)


def test_dependent_launch_is_asked_for_where_the_chip_has_it() -> None:
    device = torch.device("meta")
    for chip, there in (("sm_90", True), ("sm_80", False), ("gfx942", False), ("", False)):
        with recorded(chip):
            assert dependent(device)["PDL"] in ({there, False} if there else {False})
            assert ("launch_pdl" in dependent(device)) == dependent(device)["PDL"]
