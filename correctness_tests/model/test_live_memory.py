"""With every parameter learning, tiers hold the same bytes between steps: parameters, gradients and
two moments, whoever computed them."""

from typing import Any

import pytest
import torch

from tinyllama.bench.held import held
from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import PRESETS, ModelConfig, TrainConfig

TINY = ModelConfig(hidden_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48)
BATCH: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": 1, "seq_len": 8},
    "cuda": {"batch_size": 8, "seq_len": 128},
}


@pytest.mark.long
@pytest.mark.parametrize("tier", ["v1", "v2", "v3"])
def test_tier_holds_parameters_gradients_and_two_moments(tier: str, device: torch.device) -> None:
    if tier == "v3" and (reason := cannot("triton", device)):
        pytest.skip(reason)
    shape = TINY if device.type == "cpu" else PRESETS["small"]
    live = held(shape, tier, TrainConfig(**BATCH[device.type]), device).live
    assert live == pytest.approx(4 * 4 * shape.parameters, rel=0.02)
