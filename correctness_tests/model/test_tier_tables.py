"""Switches, memory modes and plans of tiers; no step runs here."""

import pytest

from tinyllama.harness.declare.registry import providers_restored
from tinyllama.model.config import PRESETS, TIER_NAMES, ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, V1, V2, V3, V4, StepPlan, Tier
from tinyllama.ops.stack import stack
from tinyllama.training.step import TrainStep


def test_parts_that_are_switched_off_are_those_of_v1() -> None:
    tier = V2.without("qkv", "compile", "capture", "swiglu")
    assert tier.name == "v2-no-qkv-compile-capture-swiglu"
    assert (tier.gpu, tier.cpu) == (StepPlan(), StepPlan())
    changed = {op for op in V2.table if tier.table[op] != V2.table[op]}
    assert changed == {"qkv", "swiglu"}
    assert all(tier.table[op] == V1.table[op] for op in changed)
    with pytest.raises(ConfigError, match="tier v3 has no switch 'rope': use one of compile, capt"):
        V3.without("rope")


def test_names_on_command_line_are_those_of_tiers() -> None:
    assert tuple(TIERS) == TIER_NAMES


def test_plan_of_blocks_is_provider_of_stack() -> None:
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
def test_memory_mode_that_does_not_fit_blocks_is_refused(tier: Tier, memory: str) -> None:
    with pytest.raises(ConfigError, match="memory selective needs a block that is one op, and tie"):
        V1.with_memory("selective")
    with pytest.raises(ConfigError, match=f"memory '{memory}' (and the blocks|is unknown)"):
        TrainStep(TinyLlama(PRESETS["tiny"], tier), TrainConfig(), StepPlan(memory=memory))
