"""The optimizer: which implementation updates."""

from __future__ import annotations

from typing import Any

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
    calls: list[int] = []

    def update(*args: Any, **settings: Any) -> None:
        calls.append(len(args))

    optimizer.update = update
    step(optimizer)
    assert len(calls) == 1
