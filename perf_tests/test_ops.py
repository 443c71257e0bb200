"""Every provider of every op on its timed cases, and the bars of ops in targets.toml."""

from typing import Any

import pytest
import torch

from tinyllama.bench.measure_ops import bars
from tinyllama.bench.targets import TARGETS
from tinyllama.harness.machine.device import device_name
from tinyllama.suites.timings import (
    Measured,
    group,
    pytest_generate_tests,
    test_layouts,
    test_no_op_is_faster_than_its_bytes_and_operations,
    test_op,
)

__all__ = [
    "group",
    "pytest_generate_tests",
    "test_layouts",
    "test_no_op_is_faster_than_its_bytes_and_operations",
    "test_op",
]


@pytest.mark.target
def test_targets(group: Measured, recording: Any, device: torch.device) -> None:
    """The bars of ops in targets.toml that are about this device, at each case they cover."""
    recording.hold(bars(TARGETS, *group, device_name(device)))
