"""What must be measured on this device, and what all measurements share."""

from __future__ import annotations

import pytest
import torch

from tinyllama.bench.peers import SEARCHED
from tinyllama.bench.workloads import ALL, PRECISIONS, not_here
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.ceilings import copy_rate, product_rate
from tinyllama.harness.plugins.suite import worker_device


def pytest_configure(config: pytest.Config) -> None:
    known = [str(group) for group in ALL]
    for name in filter(None, SEARCHED):
        if name not in known:
            raise pytest.UsageError(
                f"TINYLLAMA_SEARCH names {name!r}, which is no group of steps: "
                f"use some of {', '.join(known)}"
            )


@pytest.hookimpl
def pytest_tinyllama_groups(config: pytest.Config) -> list[str]:
    from perf_tests.test_curves import groups as curves
    from perf_tests.test_longest import groups as longest
    from perf_tests.test_sweep import groups as sweeps
    from perf_tests.test_switches import GROUPS as PARTS
    from tinyllama.bench.measure_ops import groups as ops

    device = worker_device(config)
    if "slow" in (config.option.markexpr or ""):
        return PARTS if device.type != "cpu" else []
    steps = [str(group) for group in ALL if not_here(group, device) is None]
    return [*steps, *ops(device), *sweeps(device), *curves(device), *longest(device)]


class Ceilings:
    """The ceilings of this run, each measured once, when first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copy: float | None = None
        self._products: dict[str, float] = {}

    def copy(self) -> float:
        """Bytes read plus bytes written per second."""
        if self._copy is None:
            self._copy = copy_rate(self.device)
        return self._copy

    def product(self, precision: str) -> float:
        """FLOP per second."""
        if precision not in self._products:
            self._products[precision] = product_rate(precision, self.device)
        return self._products[precision]

    def entries(self) -> list[tuple[str, dict[str, float]]]:
        """Those measured so far, as entries of a record."""
        found = [("ceiling/copy", {"bytes_per_second": self.copy()})]
        for precision in PRECISIONS:
            if cannot(precision, self.device) is None:
                rate = self.product(precision)
                found.append((f"ceiling/product-{precision}", {"flops_per_second": rate}))
        return found


@pytest.fixture(scope="session")
def ceilings(device: torch.device) -> Ceilings:
    return Ceilings(device)
