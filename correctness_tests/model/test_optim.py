"""The optimizer, and how the model's parameters lie in memory."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import ALIGNMENT, TinyLlama
from tinyllama.model.optim import AdamW
from tinyllama.model.tiers import V4

CONFIG = TrainConfig(learning_rate=0.05, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.3)
PROVIDERS = ("eager", "torch", "default", "triton")
SHAPE = ModelConfig(
    hidden_dim=20, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=6, vocab_size=7, init_std=0.5
)


def parameters(count: int = 3) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1 + n, 4 + n)) for n in range(count)]


def set_gradients(tensors: Sequence[torch.Tensor], step: int = 0) -> None:
    for number, parameter in enumerate(tensors):
        parameter.grad = torch.linspace(-2 + number, 1 + step, parameter.numel())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_setting_is_that_of_torch(provider: str) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = AdamW(mine, CONFIG, provider)
    expected = torch.optim.AdamW(
        theirs, lr=0.05, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3, foreach=False
    )
    for step, rate in enumerate((0.05, 0.05, 0.02)):
        optimizer.set_lr(rate)
        expected.param_groups[0]["lr"] = rate
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.step()
        expected.step()
    assert optimizer.steps.item() == 3
    for n, (parameter, want) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(parameter, want, rtol=1e-5, atol=1e-6)
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.tensors()[f"{kind}.{n}"]
            torch.testing.assert_close(moment, expected.state[want][kind])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_update_with_number_that_is_not_finite_changes_nothing(provider: str) -> None:
    tensors = parameters()
    optimizer = AdamW(tensors, CONFIG, provider)
    set_gradients(tensors)
    optimizer.found_inf.fill_(1.0)
    before = [p.detach().clone() for p in tensors]
    optimizer.step()
    assert all(map(torch.equal, tensors, before))
    assert not any(tensor.any() for tensor in optimizer.tensors().values())
    optimizer.found_inf.zero_()
    optimizer.step()
    assert not any(map(torch.equal, tensors, before))


@pytest.mark.parametrize("provider", ["eager", "torch", "triton"])
@pytest.mark.parametrize("loss", [1.0, torch.nan])
def test_updates_in_parts_are_those_of_a_whole_step(provider: str, loss: float) -> None:
    """Counted once, and judged by the loss."""

    def trained(in_parts: bool) -> list[torch.Tensor]:
        tensors = parameters()
        optimizer = AdamW(tensors, CONFIG, provider)
        for step in range(2):
            set_gradients(tensors, step)
            if in_parts:
                optimizer.begin(torch.tensor(loss))
                for index in (2, 0):
                    gradient = tensors[index].grad
                    assert gradient is not None
                    optimizer.update_with({index: gradient}, beside=False)
                optimizer.update_rest()
            elif loss == 1.0:
                optimizer.step()
        return [*tensors, optimizer.steps]

    assert all(map(torch.equal, trained(True), trained(False)))


# -- the model's memory ------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["v1", V4])
def test_parameters_lie_in_one_memory_the_matrices_of_a_block_adjoin(tier: Any) -> None:
    model = TinyLlama(SHAPE, tier)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for changed in (model, model.double()):
        named = dict(changed.named_parameters())
        assert len({p.untyped_storage().data_ptr() for p in named.values()}) == 1
        for name, parameter in named.items():
            assert torch.equal(parameter, values[name].to(parameter.dtype)), name
        for layer in range(SHAPE.num_layers):
            matrices = [p for n, p in named.items() if n.startswith(f"layers.{layer}.w_")]
            end = matrices[0].storage_offset()
            assert end % ALIGNMENT == 0
            for matrix in matrices:
                assert matrix.storage_offset() == end
                end += matrix.numel()
