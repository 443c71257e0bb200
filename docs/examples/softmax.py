"""A softmax over rows: all that is said about an op, in one file.

`python -m tinyllama check docs/examples/softmax.py` checks it here; in ``tinyllama/ops/`` it is an
op of the tree, and nothing else changes.
"""

import torch

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.kernels import jit, next_power_of_2, tl
from tinyllama.harness.values import normal

softmax = Op(
    "softmax",
    inputs={"x": Tensor("N V", grad=True)},
    outputs={"y": "N V"},
    cases=[
        Case(N=3, V=64),
        Case(N=129, V=1, why="one column, in which nothing depends on x: not the smallest case"),
        Case(N=2, V=50, why="a row that does not fill its block"),
    ],
    timed=[Case(N=1024, V=1000)],
    extremes={"wide": {"x": normal(30.0)}, "far": {"x": normal(1.0, mean=200.0)}},
    bytes={
        "forward": lambda size, N, V: 2 * N * V * size,
        "backward": lambda size, N, V: 3 * N * V * size,
    },
    flops={"forward": lambda N, V: 5 * N * V, "backward": lambda N, V: 4 * N * V},
)


@softmax.reference
def eager(x_NV: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x_NV.dtype, torch.float32)
    return torch.softmax(x_NV, -1, dtype=wide).to(x_NV.dtype)


@softmax.independent("exp over its sum")
def written_out(x: torch.Tensor) -> torch.Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


@softmax.magnitude
def terms(x: torch.Tensor, upstream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dx = p (dy - sum(p dy)); where one p is nearly 1 the two cancel."""
    p, dy = torch.softmax(x, -1), upstream["y"]
    total = (p * dy).square().sum(-1, keepdim=True)
    return {"grad x": p * (dy.square() + total).sqrt()}


@jit
def forward_kernel(x, y, highest, total, V, x_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    seen = tl.load(x + row * x_n + column, mask=column < V, other=float("-inf")).to(tl.float32)
    most = tl.max(seen, 0)
    powers = tl.exp(seen - most)
    sum_of_powers = tl.sum(powers, 0)
    tl.store(y + row * V + column, powers / sum_of_powers, mask=column < V)
    tl.store(highest + row, most)
    tl.store(total + row, sum_of_powers)


@jit
def backward_kernel(dy, x, highest, total, dx, V, dy_n, x_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < V
    up = tl.load(dy + row * dy_n + column, mask=inside, other=0.0).to(tl.float32)
    seen = tl.load(x + row * x_n + column, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(seen - tl.load(highest + row)) / tl.load(total + row)
    tl.store(dx + row * V + column, p * (up - tl.sum(up * p, 0)), mask=inside)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """The kernels take the stride of rows; within a row elements must be adjacent."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


@softmax.provider(
    "triton",
    keep=("x",),
    # For the softmax again from x, since y is rounded to its dtype; in two numbers, since the
    # logarithm of their product is off by more than a rounding where x is large.
    saved={name: Tensor("N", dtype=torch.float32) for name in ("highest", "total")},
    requires=("triton",),
    large=(Large("N", "V", {"V": 1000}),),  # N rows, until N V is beyond 2^31
)
class Triton:
    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        highest, total = (
            torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2)
        )
        if y.numel():
            x, block = rows_of(x), next_power_of_2(x.shape[1])
            forward_kernel[(len(x),)](x, y, highest, total, x.shape[1], x.stride(0), BLOCK=block)
        return y, highest, total

    @staticmethod
    def backward(grads, kept, saved, needs):
        x, dy = rows_of(kept["x"]), rows_of(grads[0])
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if dx.numel():
            V, block = x.shape[1], next_power_of_2(x.shape[1])
            backward_kernel[(len(x),)](
                dy,
                x,
                saved["highest"],
                saved["total"],
                dx,
                V,
                dy.stride(0),
                x.stride(0),
                BLOCK=block,
            )
        return {"x": dx}
