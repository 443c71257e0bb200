"""The ceilings of a run, which the shares of its entries are of."""

from __future__ import annotations

import functools

import torch

from tinyllama.bench.workloads import PRECISIONS
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.ceilings import copy_rate, product_rate
from tinyllama.harness.records.entries import CeilingEntry


class Ceilings:
    """Each is measured once, when it is first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy = functools.cache(self._copy)
        self.product = functools.cache(self._product)

    def _copy(self) -> float:
        """Bytes read plus bytes written per second."""
        return copy_rate(self.device)

    def _product(self, precision: str) -> float:
        """FLOP per second."""
        return product_rate(precision, self.device)

    def entries(self) -> list[CeilingEntry]:
        """All that the device has; those that nobody asked for are measured now."""
        return [
            CeilingEntry(name="ceiling/copy", bytes_per_second=self.copy()),
            *(
                CeilingEntry(name=f"ceiling/product-{name}", flops_per_second=self.product(name))
                for name in PRECISIONS
                if cannot(name, self.device) is None
            ),
        ]
