"""Cross-entropy of logits, the mean over tokens, in float32 or wider."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values, constant, integers, normal

TARGETS = Tensor("N", dtype=torch.int64, values=lambda dims: integers(dims["V"]))
LOSS = Tensor("", dtype=torch.float32)


def confident(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Class 0 has a probability near 0.999: its gradient is a small difference."""
    logits = normal().sample(shape, generator)
    logits[..., 0] = logits[..., 1:].logsumexp(-1) + 7.0
    return logits


cross_entropy = Op(
    "cross_entropy",
    inputs={"logits": Tensor("N V", grad=True), "targets": TARGETS},
    outputs={"loss": LOSS},
    cases=[
        Case(N=7, V=50),
        Case(N=1, V=64, why="one token"),
        Case(N=5, V=1000, why="the model's vocabulary"),
        Case(N=3, V=2, why="two classes"),
    ],
    timed=[Case(N=256, V=1000), Case(N=1024, V=1000), Case(N=8192, V=32000)],
    extremes={
        "confident": {"logits": Values("confident", confident), "targets": constant(0)},
        "far": {"logits": normal(1.0, mean=80.0)},
        "wide": {"logits": normal(20.0)},
    },
    bytes={
        "forward": lambda size, N, V: N * V * size,
        "backward": lambda size, N, V: 2 * N * V * size,
    },
    flops={"forward": lambda N, V: 4 * N * V, "backward": lambda N, V: 3 * N * V},
)


@cross_entropy.reference
def eager(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """logits (N V), targets (N) below V -> the mean loss, a float32 scalar."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    true_N = wide_NV.gather(-1, targets_N[:, None])[:, 0]
    return (wide_NV.logsumexp(-1) - true_N).mean()


@cross_entropy.provider("torch")
def stock(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), targets_N)


@cross_entropy.independent("torch.distributions.Categorical")
def categorical(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -torch.distributions.Categorical(logits=logits).log_prob(targets).mean()
