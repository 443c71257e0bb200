"""The ceilings of a run; the shares in its entries are relative to them."""

from functools import cache, partial

import torch

from tinyllama.bench.workloads import PRECISIONS
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.ceilings import copy_rate, product_rate
from tinyllama.harness.records.entries import CeilingEntry


class Ceilings:
    """Each is measured once, when it is first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy = cache(partial(copy_rate, device))  # bytes read plus bytes written per second
        self.product = cache(partial(product_rate, device=device))  # FLOP per second

    def entries(self) -> list[CeilingEntry]:
        """All ceilings of the device; those that were not asked for before are measured now."""
        return [
            CeilingEntry(name="ceiling/copy", bytes_per_second=self.copy()),
            *(
                CeilingEntry(name=f"ceiling/product-{name}", flops_per_second=self.product(name))
                for name in PRECISIONS
                if cannot(name, self.device) is None
            ),
        ]
