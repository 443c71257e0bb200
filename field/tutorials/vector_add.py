"""The sum of two vectors, in blocks (tutorial 1)."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import cdiv, jit, tl

vector_add = Op(
    "vector_add",
    inputs={"x": Tensor("N"), "y": Tensor("N")},
    outputs={"z": "N"},
    cases=[Case(N=1000), Case(N=64, why="one block"), Case(N=1, why="one element")],
)


@vector_add.reference
def eager(x_N: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    return x_N + y_N


@jit
def add_kernel(x, y, z, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(z + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@vector_add.provider("tutorials", requires=("triton",), contiguous=True, double_backward=False)
def tutorials(x_N: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    if not (x_N.is_contiguous() and y_N.is_contiguous()):
        raise ValueError("x and y must be contiguous")
    z_N = torch.empty_like(x_N)
    add_kernel[(cdiv(len(x_N), 256),)](x_N, y_N, z_N, len(x_N), BLOCK=256)
    return z_N
