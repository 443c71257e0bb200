"""An op of a user's file, y = x * weight, for the specifications of timed providers."""

import torch

from tinyllama.harness import Case, Op, Tensor

weigh = Op(
    "weigh_rows",
    inputs={"x": Tensor("N D", grad=True), "weight": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    dtypes=(torch.float32, torch.bfloat16),
    cases=[Case(N=3, D=8)],
    timed=[Case(N=16, D=64), Case(N=32768, D=16)],
)


@weigh.reference
def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@weigh.provider("float32_only", dtypes=(torch.float32,))
def float32_only(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight
