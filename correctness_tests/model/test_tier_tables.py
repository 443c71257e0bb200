"""What tiers, their switches, memory modes and plans are, as tables; no step runs here."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.two_ranks import SHAPE
from tinyllama.harness.declare.registry import providers_restored
from tinyllama.model import tiers
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, V1, V2, V3, V4, StepPlan, Tier, resolve
from tinyllama.ops import OPS
from tinyllama.ops.stack import stack
from tinyllama.training import plans
from tinyllama.training.plans import runnable
from tinyllama.training.ranks import ALONE, Ranks

CPU = torch.device("cpu")
TWO = Ranks(0, 2)
EAGER = StepPlan()


# -- tiers -------------------------------------------------------------------------------------


def test_the_tables_are_the_documented_ones() -> None:
    ops = "embedding rms_norm add_rms_norm qkv rope attention swiglu linear_cross_entropy adamw"
    tables = {
        "v1": "torch eager eager eager eager eager eager torch default",
        "v2": "torch torch torch torch eager torch torch torch torch",
        "v3": "torch triton triton torch triton triton triton triton triton",
        "v4": "triton triton triton torch triton triton triton triton triton",
    }
    more = {"v3": {"block": "triton"}, "v4": {"block": "triton", "stack": "fused"}}
    assert list(TIERS) == list(tables)
    for name, tier in TIERS.items():
        assert tier.name == name
        expected = dict(zip(ops.split(), tables[name].split(), strict=True))
        assert dict(tier.table) == expected | more.get(name, {})
        calls = tier.providers()
        assert calls == {op: OPS[op][provider].call for op, provider in tier.table.items()}
    plans = {name: (str(tier.plan("cuda")), str(tier.plan("cpu"))) for name, tier in TIERS.items()}
    assert plans == {
        "v1": ("eager", "eager"),
        "v2": ("compile + capture", "capture"),
        "v3": ("capture", "capture"),
        "v4": ("capture + overlap", "capture + overlap"),
    }


def test_a_tier_is_found_by_its_name() -> None:
    for name, tier in TIERS.items():
        assert resolve(name) is resolve(tier) is tier
    with pytest.raises(ConfigError) as caught:
        resolve("v5")
    assert str(caught.value) == "tier 'v5' does not exist: use one of v1, v2, v3, v4"


def test_each_way_of_a_plan_has_a_name() -> None:
    names: dict[str, dict[str, Any]] = {
        "eager": {},
        "compile": {"compile": True},
        "capture": {"capture": True},
        "overlap": {"overlap": True},
        "compile + capture + overlap": {"compile": True, "capture": True, "overlap": True},
        "selective-memory": {"memory": "selective"},
        "capture + small-memory": {"capture": True, "memory": "small"},
    }
    for name, settings in names.items():
        assert str(StepPlan(**settings)) == name


def test_what_any_provider_of_a_table_needs_the_tier_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a table, too, and the last of what it requires."""
    one = Tier("one", "t", {"rms_norm": "eager", "adamw": "triton"})
    host = Tier("host", "t", {"rms_norm": "eager", "adamw": "default"})
    none = Tier("none", "t", {"rms_norm": "eager", "adamw": "torch"})
    for tier, interpreted, counts in (
        (one, True, False),
        (host, False, True),
        (none, False, False),
    ):
        assert (tier.interpreted, tier.counts_on_host) == (interpreted, counts)
    asked = []

    def cannot(capability: str, device: torch.device) -> str | None:
        asked.append((capability, device))
        return "there is none" if capability == "triton" else None

    monkeypatch.setattr(tiers, "cannot", cannot)
    assert one.cannot_run(CPU) == "its adamw (triton) needs triton: there is none"
    assert asked == [("triton", CPU)]
    assert none.cannot_run(CPU) is host.cannot_run(CPU) is None


def test_the_package_of_models_loads_the_model_when_it_is_asked_for() -> None:
    import tinyllama.model as package

    assert package.TinyLlama is TinyLlama
    for name in ("tinyllama", "Tiny", "__path_of_nothing__"):
        with pytest.raises(AttributeError, match=name):
            getattr(package, name)


# -- switches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", V2.switches)
def test_a_part_that_is_switched_off_is_that_of_v1(switch: str) -> None:
    parts = {
        "norm": {"rms_norm", "add_rms_norm"},
        **{part: {part} for part in ("qkv", "attention", "swiglu", "adamw")},
    }
    assert V2.switches.keys() == parts.keys()
    tier = V2.without(switch)
    assert {op for op in V2.table if tier.table[op] != V2.table[op]} == parts[switch]
    assert all(tier.table[op] == V1.table[op] for op in parts[switch])
    assert tier == replace(V2, name=f"v2-no-{switch}", table=tier.table)


def test_several_switches_are_off_at_once() -> None:
    assert V2.without() is V2
    tier = V2.without("qkv", "compile", "capture", "swiglu")
    assert tier.name == "v2-no-qkv-compile-capture-swiglu"
    assert (tier.gpu, tier.cpu) == (EAGER, EAGER)
    assert {op for op in V2.table if tier.table[op] != V2.table[op]} == {"qkv", "swiglu"}
    only = V4.without("capture")
    assert (only.gpu, only.cpu, only.table) == (*[StepPlan(overlap=True)] * 2, V4.table)
    assert V2.without("compile").gpu == StepPlan(capture=True)
    for tier, known in ((V2, "norm, qkv, attention, swiglu, adamw, "), (V3, "")):
        with pytest.raises(ConfigError) as caught:
            tier.without("rope")
        assert str(caught.value) == (
            f"tier {tier.name} has no switch 'rope': use one of {known}compile, capture"
        )


# -- memory modes and plans of blocks ----------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "memory", "block", "stacked", "gpu", "cpu"),
    [
        (V1, "fast", None, False, "eager", "eager"),
        (V1, "small", None, False, "small-memory", "small-memory"),
        (V2, "small", None, False, "compile + small-memory", "small-memory"),
        (V3, "fast", "triton", False, "capture", "capture"),
        (V3, "selective", "selective", False, *["capture + selective-memory"] * 2),
        (V3, "small", "small", False, "small-memory", "small-memory"),
        (V4, "fast", "triton", True, "capture + overlap", "capture + overlap"),
        (V4, "selective", "selective", False, *["capture + selective-memory"] * 2),
        (V4, "small", "small", False, "small-memory", "small-memory"),
    ],
)
def test_a_memory_mode_changes_the_block_and_the_plans(
    tier: Tier, memory: str, block: str | None, stacked: bool, gpu: str, cpu: str
) -> None:
    found = tier.with_memory(memory)
    assert (found.table.get("block"), "stack" in found.table) == (block, stacked)
    assert (str(found.gpu), str(found.cpu)) == (gpu, cpu)
    rest = {op: p for op, p in tier.table.items() if op not in ("block", "stack")}
    assert {op: p for op, p in found.table.items() if op not in ("block", "stack")} == rest


@pytest.mark.parametrize("tier", [V1, V2])
def test_selective_memory_needs_a_block_that_is_one_op(tier: Tier) -> None:
    with pytest.raises(ConfigError) as caught:
        tier.with_memory("selective")
    assert str(caught.value) == (
        f"memory selective needs a block that is one op, and tier {tier.name} has none: use tier "
        "v3 or v4, or memory small"
    )


def test_a_plan_of_the_blocks_is_a_provider_of_their_op() -> None:
    assert V4.with_plan(None) is V4.with_plan("fused") is V4
    with providers_restored([stack]):
        for plan, overlap in (("single", False), ("all", True), ("none", True)):
            tier = V4.with_plan(plan)
            assert (tier.name, tier.table["stack"]) == (f"v4-{plan}", plan)
            assert tier.gpu == tier.cpu == StepPlan(capture=True, overlap=overlap)
            assert {**tier.table, "stack": "fused"} == V4.table
    for tier in (V1, V3, V4.with_memory("small")):
        assert tier.with_plan(None) is tier
        with pytest.raises(ConfigError) as caught:
            tier.with_plan("single")
        assert str(caught.value) == (
            f"plan 'single' is for blocks that are one op, which tier {tier.name} with this memory "
            "mode has not: use tier v4 with memory fast, or no plan"
        )
    with pytest.raises(ConfigError, match="plan 'up' does not exist: use fused, single, all, none"):
        V4.with_plan("up")


# -- which parts of a plan can run -------------------------------------------------------------


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that can do everything."""
    monkeypatch.setattr(plans, "cannot", lambda capability, device: None)


EVERY = StepPlan(compile=True, capture=True)
OVERLAP = StepPlan(overlap=True)
SHARDS = "shards are gathered and freed between the layers"
AT_ONCE = "a compiled backward pass gives all gradients at once"
SCALER = "the fp16 gradient scaler reads the device in every step"
COUNTS = "the optimizer of this tier counts its steps on the host"
NOT_ONE = "the blocks of this tier are not one op, or its optimizer takes all at once"
ON_HOST = {**V4.table, "adamw": "default"}


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("tier", "plan", "settings", "reasons"),
    [
        (V2, EVERY, {}, {}),
        (V2, EVERY, {"precision": "fp16"}, {"capture": SCALER}),
        (V1, EVERY, {}, {"capture": COUNTS}),
        (V2.with_memory("small"), replace(EVERY, memory="small"), {}, {"compile": AT_ONCE}),
        (V4, OVERLAP, {}, {}),
        (V3, OVERLAP, {}, {"overlap": NOT_ONE}),
        (replace(V4, table=ON_HOST), OVERLAP, {}, {"overlap": NOT_ONE}),
        (V4, OVERLAP, {"accumulate": 2}, {"overlap": "accumulated gradients wait for the last"}),
        (V4, OVERLAP, {"max_grad_norm": 1.0}, {"overlap": "clipped gradients wait for the norm"}),
        (V4, OVERLAP, {"precision": "fp16"}, {"overlap": "fp16 waits for gradients that are not"}),
        (
            V4,
            replace(OVERLAP, memory="small"),
            {},
            {"overlap": "memory small updates in an order of its own"},
        ),
    ],
)
def test_a_part_that_cannot_run_is_left_out_or_refused(
    tier: Tier, plan: StepPlan, settings: dict[str, Any], reasons: dict[str, str]
) -> None:
    """Left out where the plan is the tier's own, refused where it was given."""
    config = TrainConfig(**settings)
    own = TinyLlama(SHAPE, replace(tier, cpu=plan, gpu=plan))
    found, left_out = runnable(own, config, None, ALONE)
    assert left_out.keys() == reasons.keys()
    assert all(left_out[way].startswith(reasons[way]) for way in reasons)
    off: dict[str, Any] = dict.fromkeys(reasons, False)
    assert found == replace(plan, **off)
    if reasons:
        ((way, reason),) = reasons.items()
        with pytest.raises(ConfigError, match=f"^{way} cannot run on cpu: {reason}"):
            runnable(own, config, plan, ALONE)
    else:
        assert runnable(own, config, plan, ALONE) == (plan, {})


def test_what_the_device_cannot_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "cannot", lambda capability, device: f"no {capability}")
    monkeypatch.setattr(plans, "sharded", lambda _: True)
    model = TinyLlama(SHAPE, replace(V1, cpu=EVERY))
    _, left_out = runnable(model, TrainConfig(), None, ALONE)
    assert left_out == {"compile": "no compile", "capture": "no capture"}
    monkeypatch.setattr(plans, "cannot", lambda capability, device: None)
    assert runnable(model, TrainConfig(), None, ALONE)[1] == {"capture": SHARDS}


@pytest.mark.parametrize(
    ("stacks", "pays", "count", "by_copies", "given", "overlap"),
    [
        (True, True, 1, False, False, True),
        (True, False, 1, False, False, False),
        (False, False, 1, False, False, True),
        (True, False, 2, False, False, True),  # a collective runs beside updates
        (True, False, 2, True, False, False),
        (True, False, 1, False, True, True),
    ],
)
def test_whether_updates_pay_beside_the_products(
    stacks: bool,
    pays: bool,
    count: int,
    by_copies: bool,
    given: bool,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked for this rank's rows and the dtype of its products."""
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        asked: list[Any] = []

        def answer(x: torch.Tensor, dtype: torch.dtype) -> bool:
            asked.append((tuple(x.shape), dtype))  # noqa: B023
            return pays

        monkeypatch.setattr(plans, "pays_beside", answer)
        model = TinyLlama(SHAPE, replace(V4, cpu=OVERLAP))

        def stacked(x: torch.Tensor, dtype: torch.dtype) -> bool:
            asked.append((tuple(x.shape), dtype))  # noqa: B023
            return stacks

        model.stacks = stacked  # type: ignore[assignment, method-assign]
        config = TrainConfig(batch_size=6, seq_len=5, precision=precision)
        plan = OVERLAP if given else None
        found, left_out = runnable(model, config, plan, Ranks(0, count), by_copies)
        assert found.overlap is overlap
        reason = "with products of this size, one update at the end is faster"
        assert left_out == ({} if overlap else {"overlap": reason})
        assert set(asked) <= {((30 // count, 16), dtype)}
        assert bool(asked) == (not given and (count == 1 or by_copies))


@pytest.mark.parametrize(
    ("settings", "count", "what", "instead"),
    [
        ({"max_grad_norm": 0.5}, 1, "max_grad_norm 0.5", "no limit"),
        ({"accumulate": 2}, 1, "accumulate 2", "accumulate 1"),
        ({"precision": "fp16"}, 1, "precision fp16", "precision bf16"),
        ({}, 2, "the mean over 2 ranks", "one rank"),
        ({}, 1, "", ""),
        ({"precision": "bf16"}, 1, "", ""),
    ],
)
def test_small_memory_never_has_all_gradients(
    settings: dict[str, Any], count: int, what: str, instead: str
) -> None:
    model, plan = TinyLlama(SHAPE, "v1"), StepPlan(memory="small")
    given: Any = (model, TrainConfig(**settings), plan, Ranks(0, count))
    if not what:
        assert runnable(*given) == (plan, {})
        return
    with pytest.raises(ConfigError) as caught:
        runnable(*given)
    assert str(caught.value) == (
        f"memory small never has all gradients at once, and {what} needs them: use memory fast, or "
        f"{instead}"
    )
    assert runnable(model, given[1], EAGER, given[3]) == (EAGER, {})


def test_a_memory_mode_and_the_blocks_belong_together() -> None:
    model, config = TinyLlama(SHAPE, V3.with_memory("selective")), TrainConfig()
    plan = StepPlan(memory="selective")
    assert runnable(model, config, plan, ALONE) == (plan, {})
    for tier, memory in ((V3.with_memory("selective"), "fast"), (V3, "selective")):
        with pytest.raises(ConfigError) as caught:
            runnable(TinyLlama(SHAPE, tier), config, StepPlan(memory=memory), ALONE)
        assert str(caught.value) == (
            f"memory {memory!r} and the blocks of tier {tier.name} do not belong together: take "
            "the tier's own plan, from Tier.with_memory"
        )
    with pytest.raises(ConfigError) as caught:
        runnable(model, config, StepPlan(memory="much"), ALONE)
    assert str(caught.value) == "memory 'much' is unknown: use fast, selective, small"


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size 3 does not divide by 2 ranks"):
        runnable(TinyLlama(SHAPE), TrainConfig(batch_size=3), EAGER, TWO)
