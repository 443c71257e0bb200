"""With every parameter learning, tiers hold the same bytes between steps.

The published example counts 46% less for its kernels, and all of that is AdamW state of
parameters that got no gradient. Parameters, gradients and two moments are what a step leaves,
whoever computed it.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tinyllama.bench.held import Training, everything, held
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.memory import Allocations
from tinyllama.model.config import PRESETS, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import AdamW
from tinyllama.model.tiers import TIERS
from tinyllama.training.step import TrainStep, products

CPU = torch.device("cpu")
SAME = 0.02
TINY = ModelConfig(hidden_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48)
BATCH: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": 1, "seq_len": 8},
    "cuda": {"batch_size": 8, "seq_len": 128},
}


def shape_on(device: torch.device) -> ModelConfig:
    """The documented workload; on a CPU, where kernels are interpreted, a tiny one."""
    return TINY if device.type == "cpu" else PRESETS["small"]


def embedding_alone(step: TrainStep, tokens: torch.Tensor) -> None:
    """As if backward ended at the final norm, with states only of what has a gradient."""
    model = step.model
    step.optimizer = AdamW([model.embedding], step.config, model.tier.table["adamw"])
    everything(step, tokens)
    for parameter in model.parameters():
        if parameter is not model.embedding:
            parameter.grad = None


def held_after(tier: str, device: torch.device, train: Training = everything) -> int:
    """Bytes that a model and its step hold after they trained once, uncaptured, in float32."""
    return held(shape_on(device), tier, TrainConfig(**BATCH[device.type]), device, train).live


def within(found: int, other: float) -> bool:
    return abs(found / other - 1) <= SAME


@pytest.fixture
def by_v1(device: torch.device) -> int:
    return held_after("v1", device)


def test_v1_holds_parameters_gradients_and_two_moments(by_v1: int, device: torch.device) -> None:
    assert within(by_v1, 4 * 4 * shape_on(device).parameters)


@pytest.mark.parametrize("tier", ["v2", "v3"])
def test_a_tier_holds_after_a_step_what_v1_holds(
    tier: str, by_v1: int, device: torch.device
) -> None:
    reason = cannot("triton", device) if tier == "v3" else None
    if reason:
        pytest.skip(reason)
    found = held_after(tier, device)
    assert within(found, by_v1), f"{tier} holds {found:,} bytes, v1 {by_v1:,}"


def test_a_step_in_which_only_the_embedding_learns_holds_less(
    by_v1: int, device: torch.device
) -> None:
    found = held_after("v1", device, embedding_alone)
    model = shape_on(device)
    learning = model.vocab_size * model.hidden_dim
    assert within(found, 4 * (model.parameters + 3 * learning))
    assert not within(found, by_v1)


def test_a_step_of_small_memory_frees_what_it_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of the documented model: the gradients of a block's weights are 14 MiB, and a
    tensor of the width of the residual stream is 2 MiB. Seen before the block freed what it had
    used: 49 MiB."""
    pytest.importorskip("triton")
    from tinyllama.harness.kernels import interpreter

    monkeypatch.setattr(interpreter, "run", lambda *args, **kwargs: None)  # memory only
    cpu, config = torch.device("cpu"), TrainConfig(batch_size=8, seq_len=128)
    with Allocations() as seen, products("fp32", cpu):
        model = TinyLlama(ModelConfig(num_layers=2), TIERS["v4"].with_memory("small"))
        step = TrainStep(model, config)
        step.prepare(warm_up=0)
        held = seen.live
        tokens = torch.zeros(8, 129, dtype=torch.int64)
        step(tokens[:, :-1], tokens[:, 1:])
    assert seen.peak - held < 37.5 * 2**20, f"{(seen.peak - held) / 2**20:.1f} MiB"


# -- the counter that a CPU needs -----------------------------------------------------------------


def test_a_tensor_counts_once_and_while_somebody_holds_it() -> None:
    x = torch.zeros(100)
    with Allocations() as seen:
        x.view(10, 10)[2:].sum()
        assert seen.total == 4
        y = torch.empty(1000)
        half = y.view(2, 500)[1]
        del y
        assert seen.live == 4000, "a view holds it all"
        half.add_(1)
        torch.mul(half, 2, out=half)
        assert (seen.live, seen.total) == (4000, 4004)
    del half
    assert (seen.live, seen.total, seen.largest, seen.peak) == (0, 4004, 4000, 4000)
    torch.empty(1000)
    assert seen.total == 4004, "it counts when it is active"


def test_the_peak_is_of_what_is_there_at_a_time() -> None:
    with Allocations() as seen:
        for _ in range(5):
            torch.empty(250).add(1)
        assert (seen.total, seen.peak, seen.live) == (10000, 2000, 0)


def test_what_a_graph_or_a_module_keeps_is_seen() -> None:
    class Keeper(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x * 2
            return x.exp().sum()

    module, x = Keeper(), torch.zeros(1000, requires_grad=True)
    with Allocations() as seen:
        loss = module(x)
        assert seen.live == 8004, "the module's tensor, exp's result for its gradient, the sum"
        loss.backward()
        assert seen.live == 8004, "the module's, the gradient, the sum"
        del loss
        assert seen.live == 8000
        del module.kept
        assert seen.live == 4000
    x.grad = None
    assert seen.live == 0


def test_tensors_of_numbers_and_in_lists_are_seen() -> None:
    with Allocations() as seen:
        made = [torch.tensor([1.0, 2.0]), *torch.zeros(4, 25).split(2)]
        assert (seen.live, seen.largest) == (408, 400)
        both = torch.cat(made[1:])
        assert seen.live == 808
    del made, both
    assert seen.live == 0
