"""The optimizer: which implementation updates."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tinyllama.model.config import TrainConfig
from tinyllama.model.optim import AdamW

CONFIG = TrainConfig(batch_size=1, seq_len=1, num_steps=1)


@pytest.mark.parametrize("step", [AdamW.step, lambda optimizer: optimizer.update_part([0])])
def test_the_provider_that_is_asked_for_updates(step: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = AdamW([parameter], CONFIG, "eager")
    optimizer.update = update = Mock()
    step(optimizer)
    update.assert_called_once()


@pytest.mark.parametrize("provider", ["eager", "torch", "triton"])
@pytest.mark.parametrize("loss", [1.0, torch.nan])
def test_updates_in_parts_are_those_of_a_whole_step(provider: str, loss: float) -> None:
    def trained(in_parts: bool) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(3)]
        optimizer = AdamW(parameters, CONFIG, provider)
        for step in range(2):
            for parameter in parameters:
                parameter.grad = parameter.detach() + step
            if in_parts:
                optimizer.begin(torch.tensor(loss))
                for index in (2, 0):
                    gradient = parameters[index].grad
                    assert gradient is not None
                    optimizer.update_with({index: gradient}, beside=False)
                optimizer.update_rest()
            elif loss == loss:
                optimizer.step()
        return [*parameters, optimizer.steps]

    for got, expected in zip(trained(True), trained(False), strict=True):
        assert torch.equal(got, expected)
