"""The matrices of a block as its products read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinyllama.harness.kernels.layout import joined
from tinyllama.harness.kernels.parameter_memory import rounded


@dataclass(frozen=True)
class Matrices:
    """The matrices of a block in the dtype of its products, those of one input stacked."""

    qkv: torch.Tensor  # (Q + 2 R, D)
    out: torch.Tensor  # (D Q)
    gate_up: torch.Tensor  # (2 F, D)
    down: torch.Tensor  # (D F)

    @staticmethod
    def of(weights: Sequence[torch.Tensor], flat: torch.Tensor | None) -> "Matrices":
        """Views of ``flat``, all seven side by side; None: of the weights where they lie, with
        a copy (counted) only where two that are read as one do not lie side by side."""
        q, k, v, out, gate, up, down = weights
        width = q.shape[1]
        if flat is not None:
            rows = [w.numel() for w in weights]
            parts = flat.split([sum(rows[:3]), rows[3], sum(rows[4:6]), rows[6]])
        else:
            parts = tuple(map(joined, ((q, k, v), (out,), (gate, up), (down,))))
        stacked = [(sum(len(w) for w in several), width) for several in ((q, k, v), (gate, up))]
        shapes = (stacked[0], out.shape, stacked[1], down.shape)
        return Matrices(*(p.view(shape) for p, shape in zip(parts, shapes, strict=True)))


def narrowed(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, Matrices]:
    """The weights in the dtype of the products, flat (empty where that is their own), and the
    matrices made of them."""
    if dtype is weights[0].dtype:
        return weights[0].new_empty(0), Matrices.of(weights, None)
    wide = joined(weights)
    narrow = rounded.of(wide, dtype)
    narrow = wide.to(dtype) if narrow is None else narrow
    return narrow, Matrices.of(weights, narrow)
