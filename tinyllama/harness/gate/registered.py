"""What the layers above the harness register with the gate.

A conftest returns it from the hook `pytest_tinyllama_benchmarks`; a command passes it on.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from tinyllama.harness.gate.own import Own
from tinyllama.harness.gate.side import Benchmark


@dataclass(frozen=True)
class Registered:
    """What is gated.

    ops: the package whose ops are benchmarks. benchmarks: gives the further benchmarks of a device;
    workers import it by its name. instrument: the modules that time those, beside the one in which
    ``benchmarks`` is defined. Both sides run the candidate's files of these. own: where the trees
    are another repository's, which of its ops are benchmarks; the package itself is not compared.

    Raises ValueError for a function that cannot be imported by its name.
    """

    ops: ModuleType
    benchmarks: Callable[[torch.device], Sequence[Benchmark]] | None = None
    instrument: tuple[ModuleType, ...] = ()
    own: Own | None = None

    def __post_init__(self) -> None:
        if self.benchmarks is None:
            return
        module = sys.modules.get(self.benchmarks.__module__)
        if getattr(module, self.benchmarks.__qualname__, None) is not self.benchmarks:
            raise ValueError(
                f"benchmarks is {self.factory}, which workers cannot import: define it at the top "
                "level of a module"
            )

    @property
    def package(self) -> str:
        return self.ops.__name__

    @property
    def factory(self) -> str:
        """``module:name`` of the function; empty where there is none."""
        if self.benchmarks is None:
            return ""
        return f"{self.benchmarks.__module__}:{self.benchmarks.__qualname__}"

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that time the further benchmarks."""
        found = [] if self.benchmarks is None else [self.benchmarks.__module__]
        return (*found, *(module.__name__ for module in self.instrument))
