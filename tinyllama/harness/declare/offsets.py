"""What a provider with kernels declares about offsets past 2^31 elements.

`Large` is a case of more elements than 32 bits count; it needs a large GPU. `Op.rows_apart` and
`Op.many_programs` register functions that reach as far on a CPU, where untouched memory costs
nothing. An op in a folder keeps them in its ``offsets.py``, which is imported where they are used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tinyllama.harness.declare.values import Values

Entry = Callable[[torch.Tensor], torch.Tensor]
Results = list[torch.Tensor]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # a result, and what is right


@dataclass(frozen=True)
class Large:
    """As many entries along the first axis as take a provider past 2^31 elements.

    along: the dimension of that axis; dims: the others. entry: elements of one entry in the
    smallest tensor whose last entries lie there, as a product of dimensions ("T*D"). between: what
    an entry in between holds, by input, made from the entries at the ends; an input that is not
    named repeats its first entry. values: distributions of inputs, as of a `Case`. settings:
    constants of the op's module while the case runs, so that small sizes take large ones' paths.
    """

    along: str
    entry: str
    dims: Mapping[str, int] = field(default_factory=dict)
    between: Mapping[str, Entry] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)
    settings: Mapping[str, int] = field(default_factory=dict)


class Put(Protocol):
    """Puts a tensor's values where the slices of an axis lie 2^30 elements apart, or copies it."""

    def __call__(self, x: torch.Tensor, axis: int = 0, stride: int = ...) -> torch.Tensor: ...


class Ends(Protocol):
    """Runs the first and the last programs of a grid alone."""

    def room(self, elements: int) -> torch.Tensor:
        """Zeros in bfloat16, of which only what is touched takes memory."""

    def __call__(
        self, call: Callable[..., Results], programs: int, *far: torch.Tensor, both: bool = False
    ) -> Pairs:
        """The first and the last entries of what ``call`` gives for tensors of many entries, and
        what it gives for those entries alone. programs: how many to run at each end. both: for
        those entries alone too, where the grid does not grow with the entries."""


RowsApart = Callable[[Put], Results]
ManyPrograms = Callable[[Ends], Pairs]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values in bfloat16 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def unwritten(*shape: int) -> torch.Tensor:
    """NaN in bfloat16 on the CPU."""
    return torch.full(shape, torch.nan, dtype=torch.bfloat16)


def zero(ends: torch.Tensor) -> Any:
    """An entry of zeros."""
    return torch.zeros_like(ends[0])
