"""Cross-entropy of logits, their mean, sum or each token's own, in float32 or wider."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.offsets import zero
from tinyllama.harness.declare.values import Values, constant, integers, normal
from tinyllama.harness.kernels.layout import dense_rows
from tinyllama.ops.cross_entropy.kernels import (
    counted,
    loss_backward,
    losses_and_gradient,
    mean_loss,
    mean_scale,
    row_losses,
)

__all__ = [
    "cross_entropy",
    "loss_backward",
    "loss_forward",
    "losses_and_gradient",
    "mean_scale",
    "row_losses",
]

TARGETS = Tensor("N", dtype=torch.int64, values=lambda dims: integers(dims["V"]))
LOSS = Tensor(
    "", dtype=torch.float32, shape_by=lambda params: "N" if params["reduction"] == "none" else ""
)
# ignore_index: tokens of this target have a loss and a gradient of 0, and no part in the mean.
# reduction: "mean", "sum", or "none" for the loss of each token.
#     None ignores none, and spares the mean a launch or two.
PARAMS: dict[str, Any] = {"ignore_index": -100, "reduction": "mean"}
REDUCTIONS = ("mean", "sum", "none")
NO_TARGET = -2  # what a function of torch's is to ignore where nothing is


def wrong_params(params: Mapping[str, Any]) -> str | None:
    """What is wrong with the parameters among these, or None."""
    ignored, reduction = params["ignore_index"], params["reduction"]
    if reduction not in REDUCTIONS:
        return f"reduction is {reduction!r}: use one of {', '.join(REDUCTIONS)}"
    if ignored is not None and type(ignored) is not int:
        return f"ignore_index is {ignored!r}: give an integer, such as -100, or None"
    return None


def ignoring(classes: int, ignored: int) -> Values:
    """Targets below ``classes``, of which about a third are ``ignored``: the first one of several,
    and never the last one, so that the mean is one of something."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        targets = integers(classes).sample(shape, generator)
        targets[torch.rand(shape, generator=generator, device=generator.device) < 1 / 3] = ignored
        targets[:1] = ignored
        targets[-1:] = classes - 1
        return targets

    return Values(f"ignoring({ignored},{classes})", sample)


def option_cases(**dims: int) -> list[Case]:
    """A shape with each reduction, without and with targets that are ignored."""
    return [
        Case(
            params={"ignore_index": ignored, "reduction": reduction},
            values={} if ignored is None else {"targets": ignoring(dims["V"], ignored)},
            why=why,
            **dims,
        )
        for ignored, reduction, why in (
            (None, "mean", "the mean of all tokens"),
            (None, "sum", "the sum"),
            (None, "none", "each token's loss"),
            (-100, "mean", "the mean of tokens that are not ignored"),
            (3, "sum", "an ignored target that is a class"),
            (0, "mean", "an ignored target that is class 0"),
            (-100, "none", "each token's loss, 0 where ignored"),
        )
    ]


def confident(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Class 0 has a probability near 0.999: its gradient is a small difference. If there is
    only one class, its probability is 1, whatever the logit."""
    logits = normal().sample(shape, generator)
    if shape[-1] > 1:
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
        Case(N=2, V=4096, why="a row that fills a block"),
        Case(N=2, V=4097, why="a row that is one longer than a block"),
        Case(N=2, V=9000, why="several blocks, the last one ragged"),
        *option_cases(N=9, V=50),
    ],
    params=PARAMS,
    fits=wrong_params,
    timed=[Case(N=256, V=1000), Case(N=1024, V=1000), Case(N=8192, V=32000)],
    extremes={
        "confident": {"logits": Values("confident", confident), "targets": constant(0)},
        "far": {"logits": normal(1.0, mean=80.0)},
        "farther": {"logits": normal(1.0, mean=1e4)},
        "wide": {"logits": normal(20.0)},
    },
    bytes={
        "forward": lambda size, N, V: N * V * size,
        "backward": lambda size, N, V: 2 * N * V * size,
    },
    flops={"forward": lambda N, V: 4 * N * V, "backward": lambda N, V: 3 * N * V},
    small_kernels={"_mean": "it adds at most IN_ONE_PROGRAM losses"},
)


@cross_entropy.reference
def eager(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """logits (N V), targets (N) below V, or ``ignore_index`` -> the loss in float32: the mean or
    the sum, a scalar, or with the reduction "none" (N). The mean of no token is NaN, as torch's."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if ignore_index is None:
        loss_N = -wide_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
    else:
        ignored_N = targets_N == ignore_index
        true_N1 = targets_N.masked_fill(ignored_N, 0)[:, None]
        loss_N = -wide_NV.log_softmax(-1).gather(-1, true_N1)[:, 0].masked_fill(ignored_N, 0.0)
    return reduced(loss_N, targets_N, ignore_index, reduction)


def reduced(
    loss_N: torch.Tensor, targets_N: torch.Tensor, ignore_index: int | None, reduction: str
) -> torch.Tensor:
    """The losses of tokens (N), 0 where ignored -> the loss. Waits for no device."""
    if reduction == "none":
        return loss_N
    if reduction == "sum":
        return loss_N.sum()
    if reduction != "mean":
        raise ValueError(f"reduction is {reduction!r}: use one of {', '.join(REDUCTIONS)}")
    return (
        loss_N.mean() if ignore_index is None else loss_N.sum() / counted(targets_N, ignore_index)
    )


@cross_entropy.provider("torch")
def stock(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    ignored = NO_TARGET if ignore_index is None else ignore_index
    return F.cross_entropy(wide_NV, targets_N, ignore_index=ignored, reduction=reduction)


@cross_entropy.independent("torch.nn.functional.cross_entropy")
def stock_loss(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int | None, reduction: str
) -> torch.Tensor:
    ignored = NO_TARGET if ignore_index is None else ignore_index
    return F.cross_entropy(logits, targets, ignore_index=ignored, reduction=reduction)


@cross_entropy.magnitude(rounded_to=torch.float32)
def terms(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int | None,
    reduction: str,
    upstream: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradient is (p - 1) times a scale at the target, where p may be nearly 1; what is
    rounded is p, by the exponential and at each level of a sum over the classes in pairs."""
    counts = torch.ones_like(targets, dtype=logits.dtype)
    if ignore_index is not None:
        counts[targets == ignore_index] = 0
    total = counts.sum() if reduction == "mean" else 1
    scale = upstream["loss"].abs() * counts / total
    roundings = 1 + math.log2(logits.shape[-1])
    return {"grad logits": math.sqrt(roundings) * scale[:, None] * torch.softmax(logits, -1)}


def loss_forward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the loss as `eager`'s (float32) and the statistics of `row_losses` (2 N + 1); two
    launches."""
    loss_N, statistics = row_losses(logits_NV, targets_N, None, ignore_index)
    if reduction == "mean" and ignore_index is not None:
        return mean_loss(loss_N, targets_N, statistics, ignore_index), statistics
    return reduced(loss_N, targets_N, ignore_index, reduction), statistics


def _certain(ends_NV: torch.Tensor) -> torch.Tensor:
    """Logits that are sure of class 0: the loss and all gradients of such a row are exactly 0."""
    row_V = torch.full_like(ends_NV[0], -1e4)
    row_V[0] = 0
    return row_V


@cross_entropy.provider(
    "triton",
    requires=("triton",),
    replays=True,
    keep=("logits", "targets"),
    reads={"logits": dense_rows},
    saved={"statistics": Tensor("2*N+1", dtype=torch.float32)},
    large=(Large("N", "V", {"V": 1000}, between={"logits": _certain, "targets": zero}),),
)
class Triton:
    """Two launches forward and one backward, at any vocabulary; see `loss_forward`."""

    @staticmethod
    def forward(
        logits_NV: torch.Tensor, targets_N: torch.Tensor, ignore_index: int | None, reduction: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_forward(logits_NV, targets_N, ignore_index, reduction)

    @staticmethod
    def backward(
        grads: Grads,
        inputs: Named,
        saved: Named,
        needs: Needs,
        ignore_index: int | None,
        reduction: str,
    ) -> Named:
        (dloss,) = grads
        read = inputs["logits"], inputs["targets"], saved["statistics"]
        return {"logits": loss_backward(*read, dloss, None, ignore_index, reduction)}
