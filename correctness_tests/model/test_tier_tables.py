"""What tiers, their switches, memory modes and plans are, as tables; no step runs here."""

import pytest

from tinyllama.harness.declare.registry import providers_restored
from tinyllama.model.config import ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, V1, V2, V3, V4, StepPlan, Tier, resolve
from tinyllama.ops.stack import stack
from tinyllama.training.step import TrainStep

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=31
)


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
        expected = dict(zip(ops.split(), tables[name].split(), strict=True))
        assert dict(tier.table) == expected | more.get(name, {})
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
    with pytest.raises(ConfigError, match="tier 'v5' does not exist: use one of v1, v2, v3, v4"):
        resolve("v5")


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


def test_several_switches_are_off_at_once() -> None:
    tier = V2.without("qkv", "compile", "capture", "swiglu")
    assert tier.name == "v2-no-qkv-compile-capture-swiglu"
    assert (tier.gpu, tier.cpu) == (StepPlan(), StepPlan())
    assert {op for op in V2.table if tier.table[op] != V2.table[op]} == {"qkv", "swiglu"}
    assert V4.without("capture").gpu == StepPlan(overlap=True)
    with pytest.raises(ConfigError, match="tier v3 has no switch 'rope': use one of compile, capt"):
        V3.without("rope")


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
    changed = tier.with_memory(memory)
    assert (changed.table.get("block"), "stack" in changed.table) == (block, stacked)
    assert (str(changed.gpu), str(changed.cpu)) == (gpu, cpu)


@pytest.mark.parametrize("tier", [V1, V2])
def test_selective_memory_needs_a_block_that_is_one_op(tier: Tier) -> None:
    with pytest.raises(ConfigError, match="memory selective needs a block that is one op, and tie"):
        tier.with_memory("selective")


def test_a_plan_of_the_blocks_is_a_provider_of_their_op() -> None:
    with providers_restored([stack]):
        for plan, overlap in (("single", False), ("all", True), ("none", True)):
            tier = V4.with_plan(plan)
            assert (tier.name, tier.table["stack"]) == (f"v4-{plan}", plan)
            assert tier.gpu == tier.cpu == StepPlan(capture=True, overlap=overlap)
    for tier in (V1, V3, V4.with_memory("small")):
        with pytest.raises(ConfigError, match="plan 'single' is for blocks that are one op, which"):
            tier.with_plan("single")
    with pytest.raises(ConfigError, match="plan 'up' does not exist: use fused, single, all, none"):
        V4.with_plan("up")


@pytest.mark.parametrize(
    ("tier", "memory"), [(V3.with_memory("selective"), "fast"), (V3, "selective"), (V1, "much")]
)
def test_a_memory_mode_and_the_blocks_belong_together(tier: Tier, memory: str) -> None:
    with pytest.raises(ConfigError, match=f"memory '{memory}' (and the blocks|is unknown)"):
        TrainStep(TinyLlama(SHAPE, tier), TrainConfig(), StepPlan(memory=memory))
