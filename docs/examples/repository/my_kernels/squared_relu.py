"""relu(x)^2, element by element: forward and backward in Triton, and composed in PyTorch."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import jit, tl

BLOCK = 1024

squared_relu = Op(
    "squared_relu",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=3, D=64), Case(N=5, D=333, why="more than one block, the last one not full")],
    timed=[Case(N=512, D=256), Case(N=16384, D=8192)],
    bytes={
        "forward": lambda size, N, D: 2 * N * D * size,
        "backward": lambda size, N, D: 3 * N * D * size,
    },
    flops={"forward": lambda N, D: 2 * N * D, "backward": lambda N, D: 3 * N * D},
)


@squared_relu.reference
def eager(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


@squared_relu.provider("torch")
def composed(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) * x


@jit
def forward_kernel(x, y, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(x + place, mask=place < size).to(tl.float32)
    tl.store(y + place, tl.where(seen > 0, seen * seen, 0.0), mask=place < size)


@jit
def backward_kernel(dy, x, dx, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    up = tl.load(dy + place, mask=place < size).to(tl.float32)
    seen = tl.load(x + place, mask=place < size).to(tl.float32)
    tl.store(dx + place, tl.where(seen > 0, 2.0 * seen * up, 0.0), mask=place < size)


@squared_relu.provider("triton", keep=("x",), requires=("triton",))
class Triton:
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if y.numel():
            forward_kernel[(-(-y.numel() // BLOCK),)](x, y, y.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(grads, kept, saved, needs):
        dy, x = grads[0].contiguous(), kept["x"].contiguous()
        dx = torch.empty_like(x)
        if dx.numel():
            backward_kernel[(-(-dx.numel() // BLOCK),)](dy, x, dx, dx.numel(), BLOCK=BLOCK)
        return {"x": dx}
