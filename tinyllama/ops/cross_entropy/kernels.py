"""The kernels of cross-entropy, and their launches: each row's loss, and the gradient."""

import math
from typing import Any

import torch

from tinyllama.harness.kernels import begin, cdiv, dependent, jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import dense_rows
from tinyllama.harness.kernels.precision import SHORT


def _configs(V: int, dtype: str) -> list[Config]:
    """At least 256 elements a warp, so that no two threads hold one and a row may be replaced in
    place; at most as many as registers hold beside the next block."""
    return [
        Config(BLOCK=block, num_warps=warps)
        for block in sorted({min(V, size) for size in (1024, 2048, 4096, 8192)})
        for warps in (1, 2, 4, 8, 16)
        if 256 * warps <= block <= 512 * warps or (warps == 1 and block < 256)
    ]


def _default(V: int, dtype: str) -> Config:
    block = min(V, 4096)
    return Config(BLOCK=block, num_warps=max(1, min(8, block // 512)))


STATISTICS = Space("cross_entropy.statistics", default=_default, configs=_configs)
GRADIENT = Space("cross_entropy.gradient", default=_default, configs=_configs)
BOTH = Space("cross_entropy.losses_and_gradient", default=_default, configs=_configs)


@jit
def _statistics(line, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest m of V logits at ``line``, and the sum of exp(logit - m). The next block is
    prefetched."""
    columns = tl.arange(0, BLOCK)
    ahead = tl.load(line + columns, mask=columns < V, other=float("-inf"))
    top = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        x = ahead.to(tl.float32)
        following = first + BLOCK + columns
        ahead = tl.load(line + following, mask=following < V, other=float("-inf"))
        new = tl.maximum(top, tl.max(x, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf would be NaN
        sums = sums * tl.exp(top - finite) + tl.exp(x - finite)
        top = new
    return tl.where(top == float("-inf"), 0.0, top), tl.sum(sums, 0)


@jit
def _true_logit(line, target, V: tl.constexpr):
    """The true class's logit; NaN, and nothing read, where the target is no class."""
    is_class = (target >= 0) & (target < V)
    return tl.load(line + target, mask=is_class, other=float("nan")).to(tl.float32)


@jit
def _if_known(factor, target, V: tl.constexpr, IGNORED: tl.constexpr):
    """The factor of a row's gradient; 0 where the target is ignored, NaN, as the loss, where it is
    no class."""
    row_factor = tl.where((target >= 0) & (target < V), factor, float("nan"))
    if IGNORED is not None:
        row_factor = tl.where(target == IGNORED, 0.0, row_factor)
    return row_factor


@jit
def _unless_ignored(loss, target, IGNORED: tl.constexpr):
    if IGNORED is not None:
        loss = tl.where(target == IGNORED, 0.0, loss)
    return loss


@jit
def _row_losses(
    logits, targets, losses, statistics, N,
    stride, target_stride,
    V: tl.constexpr, IGNORED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: its loss, its largest logit, and the logarithm of its sum of
    exp(logit - largest). Added to each other these two would be rounded, and the gradient of a row
    far from zero with them."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + tl.multiple_of(row * stride, ALIGNED)
    target = tl.load(targets + row * target_stride)
    true = _true_logit(line, target, V)
    top, total = _statistics(line, V, BLOCK)
    log = tl.log(total)
    tl.store(losses + row, _unless_ignored(log + (top - true), target, IGNORED))
    tl.store(statistics + row, top)
    tl.store(statistics + N + row, log)


@jit
def _gradients(
    logits, targets, statistics, upstream, gradients, N,
    stride, out_stride, target_stride,
    V: tl.constexpr, IGNORED: tl.constexpr, REDUCTION: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a block of a row: (softmax - onehot) * upstream, in float32 to the end; upstream
    is a row's own with the reduction "none"; with "mean" it is divided by N, or by the number that
    `_mean` left behind the statistics."""
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    columns = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x = tl.load(logits + tl.multiple_of(row * stride, ALIGNED) + columns, mask=inside, other=0.0)
    target = tl.load(targets + row * target_stride)
    if REDUCTION == "none":
        factor = tl.load(upstream + row).to(tl.float32)
    else:
        factor = tl.load(upstream).to(tl.float32)
    if REDUCTION == "mean":
        number = N if IGNORED is None else tl.load(statistics + N + N)
        factor = factor / number
    factor = _if_known(factor, target, V, IGNORED)
    top, log = tl.load(statistics + row), tl.load(statistics + N + row)
    p = tl.exp((x.to(tl.float32) - top) - log)
    gradient = tl.where(columns == target, p - 1.0, p) * factor
    out = gradients + tl.multiple_of(row * out_stride, ALIGNED) + columns
    tl.store(out, gradient.to(gradients.dtype.element_ty), mask=inside)


@jit
def _row_losses_and_gradients(
    logits, targets, losses, gradients, scale,
    stride, out_stride, target_stride,
    V: tl.constexpr, IGNORED: tl.constexpr, LOADED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program a row, which is read twice only if it is longer than a block. LOADED: ``scale``
    is in the device's memory."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    line = logits + tl.multiple_of(row * stride, ALIGNED)
    out = gradients + tl.multiple_of(row * out_stride, ALIGNED)
    target = tl.load(targets + row * target_stride)
    true = _true_logit(line, target, V)
    factor = _if_known(tl.load(scale) if LOADED else scale, target, V, IGNORED)
    columns = tl.arange(0, BLOCK)
    if V <= BLOCK:
        x = tl.load(line + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        e = tl.exp(x - top)
        total = tl.sum(e, 0)
        gradient = tl.where(columns == target, e / total - 1.0, e / total) * factor
        tl.debug_barrier()  # in place: every thread has read before one writes
        tl.store(out + columns, gradient.to(gradients.dtype.element_ty), mask=columns < V)
    else:
        top, total = _statistics(line, V, BLOCK)
        inverse = 1.0 / total
        tl.debug_barrier()
        LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK
        for back in range(0, V, BLOCK):  # what was read last is in the caches still
            here = LAST - back + columns
            x = tl.load(line + here, mask=here < V, other=0.0).to(tl.float32)
            p = tl.exp(x - top) * inverse
            gradient = tl.where(here == target, p - 1.0, p) * factor
            tl.store(out + here, gradient.to(gradients.dtype.element_ty), mask=here < V)
    tl.store(losses + row, _unless_ignored(tl.log(total) + (top - true), target, IGNORED))


@jit
def _mean(
    losses, targets, loss, number, N, target_stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: how many targets are not ignored, in float32, and the mean of their losses."""
    sums = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        inside = rows < N
        target = tl.load(targets + rows.to(tl.int64) * target_stride, mask=inside, other=IGNORED)
        counts += (target != IGNORED).to(tl.int32)
        sums += tl.load(losses + rows, mask=inside, other=0.0)
    total = tl.sum(counts, 0).to(tl.float32)
    tl.store(number, total)
    tl.store(loss, tl.sum(sums, 0) / total)


def _key(logits_NV: torch.Tensor) -> dict[str, Any]:
    V = min(next_power_of_2(logits_NV.shape[1]), 2**17)
    return {"V": max(V, 16), "dtype": SHORT[logits_NV.dtype]}


def row_losses(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    loss_N: torch.Tensor | None = None,
    ignore_index: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (N V) of any float dtype, targets (N) -> each row's loss (N), and its statistics
    (2 N + 1), the largest logits m, then log(sum(exp(logit - m))), then room for `mean_loss`;
    float32.

    loss_N: where the losses go. A target outside [0, V) gives a loss and a gradient of NaN, that
    of ``ignore_index`` 0.
    """
    N, V = logits_NV.shape
    logits_NV = dense_rows(logits_NV)
    statistics = torch.empty(2 * N + 1, dtype=torch.float32, device=logits_NV.device)
    if loss_N is None:
        loss_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    if N:
        stride = logits_NV.stride(0)
        _row_losses[(N,)](
            logits_NV, targets_N, loss_N, statistics, N, stride, targets_N.stride(0),
            V=V, IGNORED=ignore_index, ALIGNED=math.gcd(stride, 16),
            **STATISTICS.choose(logits_NV.device, **_key(logits_NV)).kwargs(),
        )  # fmt: skip
    return loss_N, statistics


# Up to so many tokens one program adds their losses in less time than torch needs for a launch.
IN_ONE_PROGRAM = 2**16


def mean_loss(
    loss_N: torch.Tensor, targets_N: torch.Tensor, statistics: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Losses of tokens (N), 0 where ignored -> their mean over the others, a float32 scalar. The
    number of those goes to the end of the statistics of `row_losses`. NaN if there are none."""
    N = loss_N.shape[0]
    if N > IN_ONE_PROGRAM:
        number = counted(targets_N, ignore_index)
        statistics[2 * N].copy_(number)
        return loss_N.sum() / number
    loss = torch.empty((), dtype=torch.float32, device=loss_N.device)
    _mean[(1,)](
        loss_N, targets_N, loss, statistics[2 * N :], N, targets_N.stride(0),
        IGNORED=ignore_index, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return loss


def loss_backward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    statistics: torch.Tensor,
    dloss: torch.Tensor,
    out_NV: torch.Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The gradient (softmax - onehot) * dloss (N V) in logits' dtype, over N or the number of
    targets that are not ignored for a mean; one launch.

    statistics: those of `row_losses`, for a mean with ``ignore_index`` after `mean_loss`.
    dloss: a tensor on the device, (N) with the reduction "none", else a scalar.
    out_NV: where it goes, neighbours of a row beside each other; ``logits_NV`` itself for a caller
    who owns that memory.
    """
    N, V = logits_NV.shape
    logits_NV = dense_rows(logits_NV)
    if out_NV is None:
        out_NV = torch.empty((N, V), dtype=logits_NV.dtype, device=logits_NV.device)
    if N:
        config = GRADIENT.choose(logits_NV.device, **_key(logits_NV))
        strides = logits_NV.stride(0), out_NV.stride(0)
        _gradients[(N * cdiv(V, config["BLOCK"]),)](
            logits_NV, targets_N, statistics, dloss.contiguous(), out_NV, N, *strides,
            targets_N.stride(0), V=V, IGNORED=ignore_index, REDUCTION=reduction,
            ALIGNED=math.gcd(*strides, 16), **config.kwargs(),
        )  # fmt: skip
    return out_NV


def losses_and_gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    scale: float | torch.Tensor,
    loss_N: torch.Tensor,
    out_NV: torch.Tensor | None = None,
    ignore_index: int | None = None,
) -> torch.Tensor:
    """Each row's loss into ``loss_N`` (float32), and (softmax - onehot) * scale; one launch.

    scale: a number, or a float32 scalar on the device.
    out_NV: as in `loss_backward`; None is in place, so the caller must own ``logits_NV``, whose
    rows must be dense.
    """
    out_NV = logits_NV if out_NV is None else out_NV
    N, V = logits_NV.shape
    if N:
        strides = logits_NV.stride(0), out_NV.stride(0)
        _row_losses_and_gradients[(N,)](
            logits_NV, targets_N, loss_N, out_NV, scale, *strides, targets_N.stride(0),
            V=V, IGNORED=ignore_index, LOADED=isinstance(scale, torch.Tensor),
            ALIGNED=math.gcd(*strides, 16),
            **BOTH.choose(logits_NV.device, **_key(logits_NV)).kwargs(),
            **dependent(logits_NV.device),
        )  # fmt: skip
    return out_NV


def counted(targets_N: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """How many targets are not ignored, a scalar on their device."""
    return (targets_N != ignore_index).sum()


def mean_scale(targets_N: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """1 over the number of targets that are not ignored: a float32 scalar on their device, infinite
    where all are ignored and nothing is scaled."""
    return 1 / counted(targets_N, ignore_index).float()
