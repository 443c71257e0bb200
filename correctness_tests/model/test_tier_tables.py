"""Switches, memory modes and plans of tiers; no step runs here."""

import pytest

from tinyllama.harness.declare.registry import providers_restored
from tinyllama.model.config import PRESETS, ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V1, V2, V3, V4, StepPlan, Tier
from tinyllama.ops.stack import stack
from tinyllama.training.step import TrainStep


@pytest.mark.parametrize("switch", V2.switches)
def test_a_part_that_is_switched_off_is_that_of_v1(switch: str) -> None:
    tier = V2.without(switch)
    changed = {op for op in V2.table if tier.table[op] != V2.table[op]}
    assert changed == {"norm": {"rms_norm", "add_rms_norm"}}.get(switch, {switch})
    assert all(tier.table[op] == V1.table[op] for op in changed)


def test_several_parts_are_switched_off_at_once() -> None:
    tier = V2.without("qkv", "compile", "capture", "swiglu")
    assert tier.name == "v2-no-qkv-compile-capture-swiglu"
    assert (tier.gpu, tier.cpu) == (StepPlan(), StepPlan())
    assert {op for op in V2.table if tier.table[op] != V2.table[op]} == {"qkv", "swiglu"}
    with pytest.raises(ConfigError, match="tier v3 has no switch 'rope': use one of compile, capt"):
        V3.without("rope")


@pytest.mark.parametrize(
    ("tier", "memory", "block", "gpu"),
    [
        (V1, "small", None, "small-memory"),
        (V2, "small", None, "compile + small-memory"),
        (V3, "fast", "triton", "capture"),
        (V3, "selective", "selective", "capture + selective-memory"),
        (V3, "small", "small", "small-memory"),
        (V4, "fast", "triton", "capture + overlap"),
        (V4, "selective", "selective", "capture + selective-memory"),
        (V4, "small", "small", "small-memory"),
    ],
)
def test_a_memory_mode_changes_the_block_and_the_plan(
    tier: Tier, memory: str, block: str | None, gpu: str
) -> None:
    changed = tier.with_memory(memory)
    assert (changed.table.get("block"), str(changed.gpu)) == (block, gpu)
    assert ("stack" in changed.table) == (tier is V4 and memory == "fast")


@pytest.mark.parametrize("tier", [V1, V2])
def test_selective_memory_needs_a_block_that_is_one_op(tier: Tier) -> None:
    with pytest.raises(ConfigError, match="memory selective needs a block that is one op, and tie"):
        tier.with_memory("selective")


def test_a_plan_of_the_blocks_is_a_provider_of_their_op() -> None:
    with providers_restored([stack]):
        for plan, overlap in (("single", False), ("all", True), ("none", True)):
            tier = V4.with_plan(plan)
            assert (tier.name, tier.table["stack"]) == (f"v4-{plan}", plan)
            assert tier.gpu == StepPlan(capture=True, overlap=overlap)
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
        TrainStep(TinyLlama(PRESETS["tiny"], tier), TrainConfig(), StepPlan(memory=memory))
