"""Faults of the arithmetic of single ops, which real kernels had."""

from collections.abc import Callable
from typing import Any

import torch

from correctness_tests.support.saboteurs.base import (
    EAGER,
    Call,
    made_for,
    of,
    on_input,
    with_gradient_of,
    with_params,
    with_upstream,
)
from tinyllama.harness.correct.checks.accuracy import ABSENT, EXTREMES, GRADIENTS, OUTPUTS
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS, compose

NARROW = torch.bfloat16
T = torch.Tensor


# -- attention ----------------------------------------------------------------------------------


def _scores(q: T, k: T) -> T:
    """Scaled scores (B H T T), unmasked."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return q.transpose(1, 2) @ k.transpose(1, 2).mT * q.shape[-1] ** -0.5


def _weighted(p: T, v: T) -> T:
    v = v.repeat_interleave(p.shape[1] // v.shape[2], 2)
    return (p.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)


def _causal(scores: T, late: int = 0) -> T:
    """Masked, with so many tokens after each one left to see."""
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + late)
    return scores.masked_fill(above, float("-inf"))


@of("attention", OUTPUTS, result="o", reference=True)
def without_mask(q: T, k: T, v: T) -> T:
    return _weighted(torch.softmax(_scores(q, k), -1), v)


@of("attention", GRADIENTS)
def mask_missing_in_backward(q: T, k: T, v: T) -> T:
    return with_gradient_of(EAGER["attention"](q, k, v), without_mask(q, k, v))


@of("attention", OUTPUTS, result="o", reference=True)
def mask_one_late(q: T, k: T, v: T) -> T:
    """Each token sees the one after it."""
    return _weighted(torch.softmax(_causal(_scores(q, k), late=1), -1), v)


@of("attention", OUTPUTS, result="o", reference=True)
def groups_interleaved(q: T, k: T, v: T) -> T:
    """Query head h reads group h mod G instead of h // (H / G)."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))
    return EAGER["attention"](q, k, v)


@of("attention", OUTPUTS, result="o", reference=True)
def scaled_twice(q: T, k: T, v: T) -> T:
    return EAGER["attention"](q * q.shape[-1] ** -0.5, k, v)


@of("attention", EXTREMES)
def maximum_not_subtracted(q: T, k: T, v: T) -> T:
    """With exponentials of half precision's range: right for scores below 11."""
    p = _causal(_scores(q, k)).float().exp()
    p = torch.where(p > torch.finfo(torch.float16).max, torch.inf, p)
    return _weighted(p / p.sum(-1, keepdim=True), v)


class _NoisyDelta(torch.autograd.Function):
    """dS = P (dP - delta) with delta rounded to bfloat16, where its error adds up over a row."""

    @staticmethod
    def forward(ctx: Any, scores: T) -> T:
        p = torch.softmax(scores, -1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (p,) = ctx.saved_tensors
        delta = (p * grads[0]).sum(-1, keepdim=True).to(NARROW).to(p.dtype)
        return p * (grads[0] - delta)


@of("attention", GRADIENTS)
def delta_in_bf16(q: T, k: T, v: T) -> T:
    return _weighted(_NoisyDelta.apply(_causal(_scores(q, k))), v)


@made_for("block", OUTPUTS, result="y", reference=True)
def mask_dropped() -> Call:
    parts = {name: EAGER[name] for name in PARTS}
    return compose({**parts, "attention": without_mask})


# -- rope -----------------------------------------------------------------------------------------


@made_for("rope", GRADIENTS)
def gradient_of_k_lost_alone() -> Call:
    return on_input(OPS["rope"], "k", torch.Tensor.detach)


@of("rope", OUTPUTS, result="q_rotated", reference=True)
def one_position_late(q: T, k: T, cos: T, sin: T) -> Any:
    return EAGER["rope"](q, k, cos.roll(-1, 0), sin.roll(-1, 0))


@of("rope", OUTPUTS, result="q_rotated", reference=True)
def halves_rotated(q: T, k: T, cos: T, sin: T) -> Any:
    """Pairs (i, i + K / 2) instead of (2i, 2i + 1)."""

    def rotate(x: T) -> T:
        a, b = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)

    return rotate(q), rotate(k)


@of("rope", OUTPUTS, result="k_rotated", reference=True)
def one_head_forgotten(q: T, k: T, cos: T, sin: T) -> Any:
    rotated, turned = EAGER["rope"](q, k, cos, sin)
    return rotated, turned if k.shape[2] > 1 else k * 1


@of("rope", GRADIENTS, result="grad q", reference=True)
def turned_the_same_way_backward(q: T, k: T, cos: T, sin: T) -> Any:
    """Gradients are rotated forward once more, instead of back."""
    pairs = zip(EAGER["rope"](q, k, cos, sin), EAGER["rope"](q, k, cos, -sin), strict=True)
    return tuple(with_gradient_of(value, other) for value, other in pairs)


# -- norms ----------------------------------------------------------------------------------------


class _SummedInBf16(torch.autograd.Function):
    """A vector for each row, whose gradients are added in bfloat16."""

    @staticmethod
    def forward(ctx: Any, weight: T, rows: int) -> T:
        return weight.expand(rows, -1).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = torch.zeros_like(grads[0][0], dtype=NARROW)
        for row in grads[0]:
            total += row.to(NARROW)
        return total.to(grads[0].dtype), None


@of("rms_norm", GRADIENTS, result="grad weight")
def weight_gradient_in_bf16(x: T, weight: T, eps: float) -> T:
    rows = _SummedInBf16.apply(weight, x[..., 0].numel()).view(x.shape)
    return EAGER["rms_norm"](x, torch.ones_like(weight), eps) * rows


@of("rms_norm", OUTPUTS, result="y", reference=True)
def mean_of_the_padded_row(x: T, weight: T, eps: float) -> T:
    """The mean is taken over the next power of two."""
    width = x.shape[-1]
    padded = 1 << (width - 1).bit_length()
    return EAGER["rms_norm"](x, weight, eps * padded / width) * (padded / width) ** 0.5


@of("rms_norm", GRADIENTS, result="grad x", reference=True)
def last_rows_without_gradient(x: T, weight: T, eps: float) -> T:
    """Rows that do not fill a block of four lose their gradient."""
    flat = x.flatten(0, -2)
    whole = len(flat) // 4 * 4
    y = EAGER["rms_norm"](torch.cat((flat[:whole], flat[whole:].detach())), weight, eps)
    return y.view(x.shape)


@of("add_rms_norm", GRADIENTS, reference=True)
def residual_on_the_wrong_side(x: T, residual: T, weight: T, eps: float) -> Any:
    """The gradient of the sum goes through the norm's, instead of beside it."""
    y, total = EAGER["add_rms_norm"](x, residual, weight, eps)
    return y, with_gradient_of(total, y)


class _OnesForAbsent(torch.autograd.Function):
    """Two results; one whose gradient does not come is given one of ones."""

    @staticmethod
    def forward(ctx: Any, *results: T) -> Any:
        ctx.set_materialize_grads(False)
        ctx.shapes = results
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs = zip(grads, ctx.shapes, strict=True)
        return tuple(torch.ones_like(like) if grad is None else grad for grad, like in pairs)


@of("add_rms_norm", ABSENT)
def absent_gradient_taken_for_ones(x: T, residual: T, weight: T, eps: float) -> Any:
    return _OnesForAbsent.apply(*EAGER["add_rms_norm"](x, residual, weight, eps))


# -- losses ---------------------------------------------------------------------------------------


@of("cross_entropy", GRADIENTS, result="grad logits", reference=True)
def probabilities_in_bf16(logits: T, targets: T, **params: Any) -> T:
    """The gradient p - 1 of the true class, where p was rounded first: 0 is left of p near 1."""
    right = EAGER["cross_entropy"](logits, targets, **params)
    if params != OPS["cross_entropy"].params:
        return right
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    true = wide.gather(-1, targets[:, None])[:, 0]
    rounded = with_upstream(wide, lambda gradient: gradient.to(NARROW).to(gradient.dtype))
    return (rounded.logsumexp(-1) - true).mean()


LOSSES = ("cross_entropy", "linear_cross_entropy")


def of_losses(name: str) -> None:
    """Faults of the options that both losses have."""
    right = EAGER[name]

    @of(name, OUTPUTS, result="loss", reference=True)
    def mean_counts_ignored_targets(*args: T, ignore_index: Any, reduction: str) -> T:
        loss = right(*args, ignore_index=ignore_index, reduction=reduction)
        if ignore_index is None or reduction != "mean":
            return loss
        return loss * (args[-1] != ignore_index).double().mean().to(loss)

    @of(name, GRADIENTS, reference=True)
    def ignored_targets_keep_a_gradient(*args: T, ignore_index: Any, reduction: str) -> T:
        """Their losses are left out, and the gradients are those of class 0."""
        loss = right(*args, ignore_index=ignore_index, reduction=reduction)
        if ignore_index is None:
            return loss
        targets = args[-1].masked_fill(args[-1] == ignore_index, 0)
        return with_gradient_of(loss, right(*args[:-1], targets, reduction=reduction))

    @of(name, GRADIENTS, reference=True)
    def sum_has_the_gradient_of_the_mean(*args: T, ignore_index: Any, reduction: str) -> T:
        loss = right(*args, ignore_index=ignore_index, reduction=reduction)
        if reduction != "sum":
            return loss
        return with_gradient_of(loss, right(*args, ignore_index=ignore_index))

    @of(name, GRADIENTS, reference=True)
    def one_upstream_gradient_for_all_tokens(*args: T, ignore_index: Any, reduction: str) -> T:
        loss = right(*args, ignore_index=ignore_index, reduction=reduction)
        if reduction != "none":
            return loss
        return with_upstream(loss, lambda gradient: gradient[:1].expand_as(gradient))


for _name in LOSSES:
    of_losses(_name)


# -- the optimizer --------------------------------------------------------------------------------


def with_step(before: Callable[[T], object], call: Call = EAGER["adamw"]) -> Call:
    """AdamW that sees its step count changed; the count itself advances as it should."""

    def changed(*args: Any, **settings: Any) -> None:
        step, found_inf = args[4:6]
        count = step.clone()
        before(step)
        call(*args, **settings)
        step.copy_(count + (found_inf == 0))

    return changed


@made_for("adamw", OUTPUTS, result="param", reference=True)
def bias_correction_dropped() -> Call:
    return with_step(lambda step: step.fill_(1e6))


@made_for("adamw", OUTPUTS, result="param")
def bias_correction_frozen() -> Call:
    """The step count is read once, as in a graph that was captured with a number of the host."""
    first: dict[int, T] = {}
    return with_step(lambda step: step.copy_(first.setdefault(step.data_ptr(), step.clone())))


@made_for("adamw", OUTPUTS, result="param", reference=True)
def decay_coupled() -> Call:
    """The decay is added to the gradient."""

    def call(param: Any, grad: Any, *rest: Any, weight_decay: float, **settings: float) -> None:
        grad = [g + weight_decay * p for g, p in zip(grad, param, strict=True)]
        EAGER["adamw"](param, grad, *rest, weight_decay=0.0, **settings)

    return call


@made_for("adamw", OUTPUTS, result="param", reference=True)
def decay_dropped() -> Call:
    return with_params(OPS["adamw"], weight_decay=0.0)


@made_for("adamw", OUTPUTS, result="exp_avg", reference=True)
def betas_swapped() -> Call:
    return with_params(OPS["adamw"], beta1=0.999, beta2=0.9)


@made_for("adamw", OUTPUTS, result="param")
def run_twice_at_first() -> Call:
    """A search over configurations at the first call leaves its trial behind, in place."""
    searched: list[bool] = []

    def call(*args: Any, **settings: Any) -> None:
        if not searched:
            searched.append(True)
            EAGER["adamw"](*args, **settings)
        EAGER["adamw"](*args, **settings)

    return call


@of("cross_entropy", EXTREMES)
def rescale_clamped(logits: torch.Tensor, targets: torch.Tensor, **params: Any) -> torch.Tensor:
    """An online sum of exponentials whose rescaling between blocks is clamped."""
    largest = torch.full_like(logits[:, 0].double(), -torch.inf)
    total = torch.zeros_like(largest)
    for block in logits.double().split(1024, dim=1):
        now = torch.maximum(largest, block.amax(1))
        rescale = (largest - now).clamp_min(-2.0).exp()
        kept = total * torch.where(largest.isinf(), 0.0, rescale)
        total = kept + (block - now[:, None]).exp().sum(1)
        largest = now
    right = EAGER["cross_entropy"](logits, targets, **params)
    wrong = largest + total.log()
    return right + (wrong - logits.double().logsumexp(1)).mean().detach().to(right)
