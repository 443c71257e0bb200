"""What must be measured on this device, and what all measurements share."""

import pytest
import torch

from tinyllama.bench import curves, longest, measure_ops, scaling, sweeps
from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.peers import SEARCHED
from tinyllama.bench.table import readings_clock, table
from tinyllama.bench.workloads import ALL, SHORT_STEPS, not_here
from tinyllama.harness.plugins.suite import worker_device

__all__ = ["readings_clock", "table"]  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    names = [str(group) for group in ALL]
    for name in filter(None, SEARCHED):
        if name not in names:
            raise pytest.UsageError(
                f"TINYLLAMA_SEARCH names {name!r}, which is no group of steps: "
                f"use some of {', '.join(names)}"
            )


@pytest.hookimpl
def pytest_tinyllama_groups(config: pytest.Config) -> list[str]:
    device = worker_device(config)
    steps = [str(group) for group in ALL if not_here(group, device) is None]
    modules = (measure_ops, sweeps, curves, longest, scaling)
    return [*steps, *(name for module in modules for name in module.groups(device))]


@pytest.hookimpl
def pytest_tinyllama_short_groups(config: pytest.Config) -> list[str]:
    """On a CPU nothing is left out: its groups are short. On a GPU they are parts of groups, which
    nothing else measures."""
    device = worker_device(config)
    if device.type == "cpu":
        return pytest_tinyllama_groups(config)
    return [*SHORT_STEPS, *measure_ops.short_groups(device)]


@pytest.fixture(scope="session")
def ceilings(device: torch.device) -> Ceilings:
    return Ceilings(device)
