"""The largest element of each row; it has no gradient."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import jit, next_power_of_2, tl

row_max = Op(
    "row_max",
    inputs={"x": Tensor("N V")},
    outputs={"y": "N"},
    cases=[Case(N=3, V=64), Case(N=2, V=50, why="a row that does not fill its block")],
    timed=[Case(N=512, V=256), Case(N=16384, V=8192)],
    bytes={"forward": lambda size, N, V: (N * V + N) * size},
    flops={"forward": lambda N, V: N * V},
)


@row_max.reference
def eager(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1)


@row_max.provider("torch")
def with_places(x: torch.Tensor) -> torch.Tensor:
    return x.max(-1).values


@jit
def row_max_kernel(x, y, V, x_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    seen = tl.load(x + row * x_n + column, mask=column < V, other=float("-inf"))
    tl.store(y + row, tl.max(seen.to(tl.float32), 0))


@row_max.provider("triton", requires=("triton",))
def launched(x: torch.Tensor) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    N, V = x.shape
    y = torch.empty(N, dtype=x.dtype, device=x.device)
    if N:
        row_max_kernel[(N,)](x, y, V, x.stride(0), BLOCK=next_power_of_2(V))
    return y
