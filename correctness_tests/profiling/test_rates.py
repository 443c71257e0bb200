"""The rates of a step's ops: what declarations say of a step, by hand, beside measured times."""

import pytest

from tinyllama.model.config import PRESETS, TrainConfig
from tinyllama.model.tiers import TIERS
from tinyllama.profiling import flops
from tinyllama.profiling.rates import costs
from tinyllama.profiling.workload import Workload

MODEL = PRESETS["small"]
TOKENS = 8 * 128


def workload(tier: str, precision: str = "fp32") -> Workload:
    return Workload(MODEL, TrainConfig(batch_size=8, seq_len=128, precision=precision), tier=tier)


def test_the_costs_of_a_step_are_those_of_its_ops() -> None:
    found = costs(workload("v1"))
    layers, rows = MODEL.num_layers, TOKENS * MODEL.hidden_dim
    assert found["rms_norm"].bytes == pytest.approx(layers * 2 * 4 * rows, rel=0.01)
    assert found["final_norm"].bytes == pytest.approx(2 * 4 * rows, rel=0.01)
    wide = MODEL.hidden_dim**2 + MODEL.ffn_dim * MODEL.hidden_dim  # the products of a block's own
    assert found["block"].flops == layers * 2 * TOKENS * wide
    assert found["block backward"].flops == 2 * found["block"].flops
    assert found["adamw"].bytes == 7 * 4 * MODEL.parameters
    assert "adamw backward" not in found
    half = costs(workload("v1", "bf16"))
    assert half["rope"].bytes < 0.7 * found["rope"].bytes
    assert half["adamw"] == found["adamw"]


@pytest.mark.parametrize("tier", TIERS)
def test_operations_add_up_to_those_of_the_declarations(tier: str) -> None:
    """Also where one provider computes a whole block."""
    whole = sum(cost.flops for cost in costs(workload(tier)).values())
    assert whole == pytest.approx(sum(flops.declared(MODEL, 8, 128).values()), rel=0.01)
