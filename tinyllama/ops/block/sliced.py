"""The SwiGLU of a block and its residual, computed in slices of rows. Of tensors that are F or 2 F
wide, only one slice exists at a time. In memory mode ``small`` that is less than the gradients of
the block's weights."""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tinyllama.ops.linear import input_gradient, weight_gradient
from tinyllama.ops.silu_mul import activate, activate_backward

SLICES, FEWEST_ROWS = 8, 16  # at most so many slices, of at least so many rows


def slices(n_rows: int) -> Iterator[slice]:
    """Slices of about the same length that cover the rows; none for no rows."""
    count = min(SLICES, max(1, n_rows // FEWEST_ROWS))
    ends = [n_rows * i // count for i in range(count + 1)]
    return (slice(start, end) for start, end in itertools.pairwise(ends))


def forward(
    sum_ND: torch.Tensor, normed_ND: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """sum + W_down (silu(gate) up), (N D) in the dtype of sum. The other arguments have that of the
    products: normed (N D), gate_up (2F D), down (D F)."""
    y_ND = torch.empty_like(sum_ND)
    for rows in slices(len(sum_ND)):
        h_NF = activate(*F.linear(normed_ND[rows], gate_up).chunk(2, -1))
        torch.add(sum_ND[rows], F.linear(h_NF, down), out=y_ND[rows])
    return y_ND


def backward(
    dy_ND: torch.Tensor,
    normed_ND: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of normed (N D), and in ``wide`` of gate_up (2F D) and down (D F); dy (N D) and
    all arguments have the dtype of the products."""
    dnormed_ND = torch.empty_like(normed_ND)
    dgate_up = torch.zeros_like(gate_up, dtype=wide)
    ddown = torch.zeros_like(down, dtype=wide)
    for rows in slices(len(dy_ND)):
        both_NF = F.linear(normed_ND[rows], gate_up)
        h_NF = input_gradient(dy_ND[rows], down)  # its gradient, which h then replaces
        gate, up = both_NF.chunk(2, -1)
        activate_backward(h_NF, gate, up, gate, up, h_NF)
        _add(ddown, dy_ND[rows], h_NF)
        _add(dgate_up, both_NF, normed_ND[rows])
        dnormed_ND[rows] = input_gradient(both_NF, gate_up)
        del both_NF, gate, up, h_NF  # before the next slice is made
    return dnormed_ND, dgate_up, ddown


def _add(total_FD: torch.Tensor, dy_NF: torch.Tensor, x_ND: torch.Tensor) -> None:
    """total += dy^T x"""
    if total_FD.dtype is dy_NF.dtype:
        total_FD.addmm_(dy_NF.T, x_ND)
    else:
        total_FD += weight_gradient(dy_NF, x_ND, total_FD.dtype)
