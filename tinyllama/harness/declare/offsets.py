"""A case of more elements than 32 bits count."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllama.harness.declare.values import Values

Entry = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Large:
    """As many entries along the first axis as take a provider past 2^31 elements. It needs a large
    GPU; on a CPU the case runs with few entries.

    along: the dimension of that axis.
    entry: the elements of one entry of the smallest tensor whose last entries lie there, as a
        product of dimensions ("T*D").
    dims: the sizes of the other dimensions.
    between: by input, what an entry in between holds, made from the entries at the ends; an input
        that is not named repeats its first entry.
    values: distributions of inputs, as of a `Case`.
    settings: constants of the op's module while the case runs, so that small sizes take the paths
        of large ones.
    """

    along: str
    entry: str
    dims: Mapping[str, int] = field(default_factory=dict)
    between: Mapping[str, Entry] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)
    settings: Mapping[str, int] = field(default_factory=dict)


def zero(ends: torch.Tensor) -> Any:
    """An entry of zeros, for `Large.between`."""
    return torch.zeros_like(ends[0])
