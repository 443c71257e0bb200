"""A case of a provider, held to eager's own error."""

from __future__ import annotations

import pytest
import torch

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.machine.device import cannot


def assert_accurate(case: OpCase, device: torch.device, seed: int) -> None:
    for capability in case.provider.requires:
        reason = cannot(capability, device)
        if reason:
            pytest.skip(f"{case.provider.name}: {reason}")
    comparisons = case.compare(device, seed)
    assert comparisons, "nothing was compared"
    wrong = [str(comparison) for comparison in comparisons if not comparison.passed]
    assert not wrong, "\n".join([str(case), *wrong])
