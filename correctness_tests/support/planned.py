"""An op with a kernel, whose calls plans may repeat (`tinyllama.harness.kernels.plans`)."""

from collections.abc import Callable
from typing import Any

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.kernels.layout import contiguous


@jit
def scale_kernel(x, y, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, factor * tl.load(x + at, mask=at < n), mask=at < n)


SCALE = Space(
    "planned.scale",
    default=lambda: Config(BLOCK=16),
    configs=lambda: [Config(BLOCK=16), Config(BLOCK=32)],
)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = torch.empty_like(x)
    config = SCALE.choose(x.device)
    n = x.numel()
    scale_kernel[(-(-n // config["BLOCK"]),)](x, y, factor, n, **config.kwargs())
    return y


def scaling(name: str) -> tuple[Op, list[str]]:
    """y = factor x, and the passes that were run as they are written."""
    ran: list[str] = []
    op = Op(
        name,
        inputs={"x": Tensor("N", grad=True)},
        params={"factor": 3.0},
        outputs={"y": "N"},
        cases=[Case(N=64)],
    )

    @op.reference
    def eager(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return x * factor

    @op.provider("triton", requires=("triton",), replays=True)
    class Triton:
        @staticmethod
        def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
            ran.append("forward")
            return scaled(contiguous(x), factor)

        @staticmethod
        def backward(grads: Any, kept: Any, saved: Any, needs: Any, factor: float) -> Any:
            ran.append("backward")
            return {"x": scaled(grads[0].contiguous(), factor)}

    return op, ran


_NUMBER = iter(range(10**6))


class Calls:
    """An op of its own, and what its calls give."""

    def __init__(self) -> None:
        self.op, self.ran = scaling(f"scaling_{next(_NUMBER)}")

    def __call__(self, x: torch.Tensor, grad: torch.Tensor | None = None, **params: Any) -> None:
        """Whether the results are right; they may come from a plan."""
        x = x.detach().requires_grad_()
        y = self.op["triton"](x, **params)
        grad = torch.ones_like(y) if grad is None else grad
        y.backward(grad)
        factor = params.get("factor", 3.0)
        assert torch.equal(y, x * factor)
        assert x.grad is not None
        assert torch.equal(x.grad, grad * factor)

    def new(self, call: Callable[[], None]) -> list[str]:
        """The passes that a call ran as they are written."""
        before = len(self.ran)
        call()
        return self.ran[before:]


X = torch.arange(64.0)


BOTH = ["forward", "backward"]


def shifted(places: int) -> torch.Tensor:
    return torch.arange(64.0 + places)[places:]
