"""Saboteurs of single ops: faults of their arithmetic that real kernels had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from correctness_tests.support.saboteurs import EAGER, Call, Saboteur, on_input, with_params
from tinyllama.harness.correct.checks.accuracy import ABSENT, EXTREMES, GRADIENTS, OUTPUTS
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS, compose

NARROW = torch.bfloat16


def with_gradient_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """One tensor's values with the gradient of another."""
    return other + (value - other).detach()


# -- attention ----------------------------------------------------------------------------------


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled scores (B H T T), unmasked."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return q.transpose(1, 2) @ k.transpose(1, 2).mT * q.shape[-1] ** -0.5


def _weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    v = v.repeat_interleave(p.shape[1] // v.shape[2], 2)
    return (p.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)


def _causal(scores: torch.Tensor) -> torch.Tensor:
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(above, float("-inf"))


def without_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _weighted(torch.softmax(_scores(q, k), -1), v)


def mask_missing_in_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return with_gradient_of(EAGER["attention"](q, k, v), without_mask(q, k, v))


def mask_one_late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each token sees the one after it."""
    scores = _scores(q, k)
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(2)
    return _weighted(torch.softmax(scores.masked_fill(above, float("-inf")), -1), v)


def groups_interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Query head h reads group h mod G instead of h // (H / G)."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))
    return EAGER["attention"](q, k, v)


def scaled_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return EAGER["attention"](q * q.shape[-1] ** -0.5, k, v)


def maximum_not_subtracted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With exponentials of half precision's range: right for scores below 11."""
    p = _causal(_scores(q, k)).float().exp()
    p = torch.where(p > torch.finfo(torch.float16).max, torch.inf, p)
    return _weighted(p / p.sum(-1, keepdim=True), v)


class _NoisyDelta(torch.autograd.Function):
    """dS = P (dP - delta) with delta rounded to bfloat16, where its error adds up over a row."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(scores, -1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (p,) = ctx.saved_tensors
        delta = (p * grads[0]).sum(-1, keepdim=True).to(NARROW).to(p.dtype)
        return p * (grads[0] - delta)


def delta_in_bf16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _weighted(_NoisyDelta.apply(_causal(_scores(q, k))), v)


# -- rope -----------------------------------------------------------------------------------------

Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def one_position_late(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Any:
    return EAGER["rope"](q, k, cos.roll(-1, 0), sin.roll(-1, 0))


def halves_rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Pairs (i, i + K / 2) instead of (2i, 2i + 1)."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)

    return rotate(q), rotate(k)


def one_head_forgotten(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Any:
    rotated, turned = EAGER["rope"](q, k, cos, sin)
    return rotated, turned if k.shape[2] > 1 else k * 1


def turned_the_same_way_backward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Any:
    """Gradients are rotated forward once more, instead of back."""
    pairs = zip(EAGER["rope"](q, k, cos, sin), EAGER["rope"](q, k, cos, -sin), strict=True)
    return tuple(with_gradient_of(value, other) for value, other in pairs)


# -- norms ----------------------------------------------------------------------------------------


class _SummedInBf16(torch.autograd.Function):
    """A vector for each row, whose gradients are added in bfloat16."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: int) -> torch.Tensor:
        return weight.expand(rows, -1).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = torch.zeros_like(grads[0][0], dtype=NARROW)
        for row in grads[0]:
            total += row.to(NARROW)
        return total.to(grads[0].dtype), None


def weight_gradient_in_bf16(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = _SummedInBf16.apply(weight, x[..., 0].numel()).view(x.shape)
    return EAGER["rms_norm"](x, torch.ones_like(weight), eps) * rows


def mean_of_the_padded_row(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The mean is taken over the next power of two."""
    width = x.shape[-1]
    padded = 1 << (width - 1).bit_length()
    return EAGER["rms_norm"](x, weight, eps * padded / width) * (padded / width) ** 0.5


def last_rows_without_gradient(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows that do not fill a block of four lose their gradient."""
    flat = x.flatten(0, -2)
    whole = len(flat) // 4 * 4
    y = EAGER["rms_norm"](torch.cat((flat[:whole], flat[whole:].detach())), weight, eps)
    return y.view(x.shape)


def residual_on_the_wrong_side(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Any:
    """The gradient of the sum goes through the norm's, instead of beside it."""
    y, total = EAGER["add_rms_norm"](x, residual, weight, eps)
    return y, with_gradient_of(total, y)


class _OnesForAbsent(torch.autograd.Function):
    """Two results; one whose gradient does not come is given one of ones."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.shapes = results
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs = zip(grads, ctx.shapes, strict=True)
        return tuple(torch.ones_like(like) if grad is None else grad for grad, like in pairs)


def absent_gradient_taken_for_ones(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Any:
    return _OnesForAbsent.apply(*EAGER["add_rms_norm"](x, residual, weight, eps))


# -- losses ---------------------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """A gradient that passes through bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(NARROW).to(grads[0].dtype)


def probabilities_in_bf16(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The gradient p - 1 of the true class, where p was rounded first: nothing is left at p near
    1."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    true = wide.gather(-1, targets[:, None])[:, 0]
    return (_Rounded.apply(wide).logsumexp(-1) - true).mean()


# -- the optimizer --------------------------------------------------------------------------------


def adamw_without(part: str) -> Call:
    """AdamW with its bias correction dropped, or with the decay added to the gradient."""

    def call(
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        step: torch.Tensor,
        found_inf: torch.Tensor,
        weight_decay: float,
        **settings: float,
    ) -> None:
        count = step.clone()
        if part == "bias correction":
            step.fill_(1e6)
        if part == "decoupled decay":
            grad = [g + weight_decay * p for g, p in zip(grad, param, strict=True)]
            weight_decay = 0.0
        EAGER["adamw"](
            param, grad, exp_avg, exp_avg_sq, step, found_inf, weight_decay=weight_decay, **settings
        )
        step.copy_(count + (found_inf == 0))

    return call


def frozen_bias_correction() -> Call:
    """The step count is read once, as in a graph that was captured with a number of the host."""
    seen: dict[int, torch.Tensor] = {}

    def call(*args: Any, **settings: Any) -> None:
        step = args[4]
        count = step.clone()
        step.copy_(seen.setdefault(step.data_ptr(), count))
        EAGER["adamw"](*args, **settings)
        step.copy_(count + (args[5] == 0))

    return call


def twice_at_first() -> Call:
    """A search over configurations at the first call leaves its trial behind, in place."""
    searched: list[bool] = []

    def call(*args: Any, **settings: Any) -> None:
        if not searched:
            searched.append(True)
            EAGER["adamw"](*args, **settings)
        EAGER["adamw"](*args, **settings)

    return call


# -- all ------------------------------------------------------------------------------------------


def of_ops() -> Iterator[Saboteur]:
    """The saboteurs of this file."""

    def of(op: str, call: Call, check: str, result: str = "", reference: bool = False) -> Saboteur:
        return Saboteur(OPS[op], call.__name__, lambda: call, (check,), result, reference)

    call: Call
    for call in (without_mask, mask_one_late, groups_interleaved, scaled_twice):
        yield of("attention", call, OUTPUTS, "o", reference=True)
    yield of("attention", mask_missing_in_backward, GRADIENTS)
    yield of("attention", delta_in_bf16, GRADIENTS)
    yield of("attention", maximum_not_subtracted, EXTREMES)
    parts = {name: EAGER[name] for name in PARTS}
    unmasked = compose({**parts, "attention": without_mask})
    yield Saboteur(OPS["block"], "mask_dropped", lambda: unmasked, (OUTPUTS,), "y", True)
    for call in (one_position_late, halves_rotated):
        yield of("rope", call, OUTPUTS, "q_rotated", reference=True)
    yield of("rope", one_head_forgotten, OUTPUTS, "k_rotated", reference=True)
    yield of("rope", turned_the_same_way_backward, GRADIENTS, "grad q", reference=True)
    yield of("rms_norm", weight_gradient_in_bf16, GRADIENTS, "grad weight")
    yield of("rms_norm", mean_of_the_padded_row, OUTPUTS, "y", reference=True)
    yield of("rms_norm", last_rows_without_gradient, GRADIENTS, "grad x", reference=True)
    yield of("add_rms_norm", residual_on_the_wrong_side, GRADIENTS, reference=True)
    yield of("add_rms_norm", absent_gradient_taken_for_ones, ABSENT)
    yield of("cross_entropy", probabilities_in_bf16, GRADIENTS, "grad logits", reference=True)

    adamw = OPS["adamw"]
    for fault, make, result in (
        ("bias_correction_dropped", lambda: adamw_without("bias correction"), "param"),
        ("bias_correction_frozen", frozen_bias_correction, "param"),
        ("decay_coupled", lambda: adamw_without("decoupled decay"), "param"),
        ("decay_dropped", lambda: with_params(adamw, weight_decay=0.0), "param"),
        ("betas_swapped", lambda: with_params(adamw, beta1=0.999, beta2=0.9), "exp_avg"),
        ("run_twice_at_first", twice_at_first, "param"),
    ):
        known = fault not in ("run_twice_at_first", "bias_correction_frozen")
        yield Saboteur(adamw, fault, make, (OUTPUTS,), result, known)
    yield Saboteur(
        OPS["rope"],
        "gradient_of_k_lost_alone",
        lambda: on_input(OPS["rope"], "k", torch.Tensor.detach),
        (GRADIENTS,),
    )
