"""In a step of V3 no kernel copies what it is given: parameters lie side by side, and kernels take
strides. `tinyllama.harness.kernels.layout` counts what is copied."""

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels import layout
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training.step import TrainStep, products

SHAPE = ModelConfig(
    hidden_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48, vocab_size=101
)


def copies_of_a_step(precision: str, device: torch.device, *, copied: bool = False) -> int:
    """copied: a matrix does not lie beside the others."""
    model = TinyLlama(SHAPE, "v3").to(device)
    if copied:
        matrix = model.layers[0].get_parameter("w_k")
        matrix.data = matrix.data.clone()
    config = TrainConfig(batch_size=2, seq_len=5, precision=precision)
    with products(precision, device):
        step = TrainStep(model, config, StepPlan())
        step.prepare(warm_up=0)
        before = layout.copies
        step(torch.arange(12).view(2, 6).to(device))
    return layout.copies - before


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_copies_nothing(precision: str, device: torch.device) -> None:
    assert copies_of_a_step(precision, device) == 0


def test_matrices_that_lie_apart_are_copied_and_counted(device: torch.device) -> None:
    """In both passes."""
    assert copies_of_a_step("fp32", device, copied=True) == 2
