"""Faults of an outsider that every check passed once, each on the smallest op that can have it, and
the right implementation beside it."""

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from correctness_tests.support.tried import FP32, MATRIX, finding, small
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.checks import Candidate, Rank, between, state
from tinyllama.harness.correct.checks.accuracy import ABSENT, LAYOUTS, UPSTREAMS
from tinyllama.harness.correct.evaluate import Inputs

WEIGHT = Tensor("D", grad=True)
weighed = small("weighed", lambda x, w: x * w, {"x": MATRIX, "w": WEIGHT}, {"y": "N D"})
SIZES = [Case(N=5, M=3, D=8)]
deep = small("deep", lambda x: x * x, {"x": Tensor("N M D", grad=True)}, {"y": "N M D"}, SIZES)


def rank(op: Op, call: Any, check: str, **traits: Any) -> Rank | None:
    """Of what one check finds."""
    return finding(op, call, check, **traits).rank


# -- between a forward pass and its backward pass --------------------------------------------------


def weighing(
    keep: Callable[..., Any] | None = None,
    kept: Callable[..., Any] | None = None,
    give: Callable[..., Any] = lambda ctx, *gradients: gradients,
) -> Any:
    """x w with a backward pass; keep, kept: instead of `save_for_backward` and `saved_tensors`.
    give: makes what is given of the gradients."""

    class Weighing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x * w
            (keep or type(ctx).save_for_backward)(ctx, *((x, w) if keep is None else (x, w, y)))
            return y

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            x, w = ctx.saved_tensors if kept is None else kept(ctx)
            return give(ctx, upstream[0] * w, (upstream[0] * x).sum(0))

    return Weighing.apply


RING = [torch.empty(0) for _ in range(4)]
KEPT: list[torch.Tensor] = []


def on_itself(ctx: Any, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    ctx.kept = x, w


def in_a_ring(ctx: Any, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    ctx.save_for_backward(w)
    RING.append(RING.pop(0).resize_(x.shape).copy_(x.detach()))
    ctx.x = RING[-1]


def with_strides(ctx: Any, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    ctx.save_for_backward(x, w)
    ctx.strides = x.stride()


def strided(ctx: Any) -> Any:
    x, w = ctx.saved_tensors
    return x.as_strided(x.shape, ctx.strides), w


def in_a_list(ctx: Any, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    ctx.save_for_backward(x, w)
    KEPT.append(x)


def in_a_cycle(ctx: Any, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    ctx.save_for_backward(x, w)
    ctx.y = y


def in_one_buffer(ctx: Any, dx: torch.Tensor, dw: torch.Tensor) -> Any:
    if not hasattr(ctx, "dw"):
        ctx.dw = torch.empty_like(dw)
    return dx, ctx.dw.copy_(dw)


def what_it_reads(ctx: Any, dx: torch.Tensor, dw: torch.Tensor) -> Any:
    if not hasattr(ctx, "dw"):
        ctx.dw, ctx.of = dw, dw.clone()
    return dx, ctx.dw if torch.equal(dw, ctx.of) else dw


@pytest.mark.parametrize(
    ("call", "expected", "words"),
    [
        (weighing(), None, ""),
        (weighing(on_itself, lambda ctx: ctx.kept), Rank.UNSAFE, "an input that is changed"),
        (weighing(in_a_ring, lambda ctx: (ctx.x, *ctx.saved_tensors)), Rank.WRONG, "several other"),
        (weighing(with_strides, strided), Rank.WRONG, "save_on_cpu"),
        (weighing(in_a_list), Rank.UNSAFE, "memory of x is not released by 8 other"),
        (weighing(in_a_cycle), Rank.ADVICE, "when Python collects cycles"),
        (weighing(give=in_one_buffer), Rank.WRONG, "another upstream gradient"),
        (weighing(give=what_it_reads), Rank.UNSAFE, "shares memory with what a later"),
    ],
)
def test_what_is_between_the_passes(call: Any, expected: Rank | None, words: str) -> None:
    seen = finding(weighed, call, "backward twice", double_backward=False)
    assert seen.rank is expected, seen
    assert words in seen.message


@pytest.mark.parametrize("on", [True, False])
def test_cycles_are_collected_when_the_check_asks_for_it(on: bool) -> None:
    """Not during the calls, however often Python does it by itself; later it goes on as before."""
    drawn: list[tuple[int, bool]] = []
    kept: list[torch.Tensor] = []

    def give(ctx: Any, *gradients: torch.Tensor) -> Any:
        kept.extend(gradients)
        return gradients

    class Noting(Candidate):
        def inputs(self, case: OpCase, draw: int = 0) -> Inputs:
            drawn.append((draw, gc.isenabled()))
            return super().inputs(case, draw)

    tried = Provider("weighed", "tried", weighing(in_a_cycle, give=give), dtypes=FP32)
    case = OpCase(weighed, tried, weighed.cases[0], torch.float32)
    try:
        if not on:
            gc.disable()
        found = between._alive(Noting(weighed, tried), case)
        assert gc.isenabled() == on
    finally:
        gc.enable()
    always = ["grad x", "grad w"]
    assert found == {False: ["x", "w", "y", *always], True: always}
    assert drawn == [(number, False) for number in range(between.IN_FLIGHT)]


# -- layouts, and combinations ---------------------------------------------------------------------


def misread(x: torch.Tensor, *, of: str) -> torch.Tensor:
    """x, or what a kernel reads that takes one rare layout for a dense one."""
    rare = {
        "swapped": x.dim() == 3 and x.transpose(0, 1).is_contiguous() and not x.is_contiguous(),
        "broadcast": x.stride(-1) == 0 and x.stride(0) != 0,
        "shared": x.dim() == 3 and x.stride(1) == 0 and x.stride(0) != 0,
        "faint": 0 < float(x.detach().abs().max()) < 1e-9,
    }
    return x * 2 if rare[of] else x


class _Upstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: str) -> torch.Tensor:
        ctx.of = of
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return misread(upstream[0], of=ctx.of), None


@pytest.mark.parametrize("of", ["swapped", "broadcast", "shared", "faint"])
def test_rare_layouts_of_inputs_and_of_upstream_gradients(of: str) -> None:
    square = deep["eager"].call
    assert rank(deep, lambda x: _Upstream.apply(square(x), of), LAYOUTS) is None
    assert rank(deep, lambda x: _Upstream.apply(square(x), of), UPSTREAMS) is Rank.WRONG
    if of != "faint":
        assert rank(deep, lambda x: square(misread(x, of=of)), LAYOUTS) is Rank.WRONG


class _Two(torch.autograd.Function):
    """x w and x + w; wrong, if it is to be, where x alone is wanted and the sum has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, wrong: bool) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.wrong = wrong and not w.requires_grad
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        x, w = ctx.saved_tensors
        of_product, of_sum = (0 if one is None else one for one in upstream)
        twice = 2 if ctx.wrong and upstream[1] is None else 1
        return twice * of_product * w + of_sum, of_product * x + of_sum, None


def test_an_absent_gradient_where_another_one_alone_is_wanted() -> None:
    both = {"y": "N D", "z": "N D"}
    two = small("two", lambda x, w: (x * w, x + w), {"x": MATRIX, "w": MATRIX}, both)
    for wrong in (False, True):
        seen = rank(two, lambda x, w, wrong=wrong: _Two.apply(x, w, wrong), ABSENT)
        assert seen is (Rank.WRONG if wrong else None)


# -- kernels ---------------------------------------------------------------------------------------


def test_a_load_without_other_is_held_to_its_mask() -> None:
    pytest.importorskip("triton")
    from tinyllama.harness.kernels.launch import jit, tl

    @jit
    def sum_kernel(x, y, D, OTHER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0), tl.arange(0, BLOCK)
        if OTHER:
            seen = tl.load(x + row * D + column, mask=column < D, other=0.0)
        else:
            seen = tl.load(x + row * D + column, mask=column < D)
        tl.store(y + row, tl.sum(seen, 0))

    def call(other: bool) -> Any:
        def of(x: torch.Tensor) -> torch.Tensor:
            x, y = x.contiguous(), x.new_empty(len(x))
            sum_kernel[(len(x),)](x, y, x.shape[1], OTHER=other, BLOCK=16)
            return y

        return of

    total = small("total", lambda x: x.sum(1), {"x": Tensor("N D")}, {"y": "N"})
    assert rank(total, call(True), "fresh contents", requires=("triton",)) is None
    seen = finding(total, call(False), "fresh contents", requires=("triton",))
    assert seen.rank is Rank.ADVICE, seen
    assert "what the mask of a load leaves out, without `other`, changes y" in seen.message


# -- settings, and calls without gradients ---------------------------------------------------------


def after(change: Callable[[], Any]) -> Any:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        change()
        return x * w

    return call


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: torch.set_num_threads(1), "the number of threads"),
        (lambda: random.seed(0), "Python's random"),
        (lambda: np.random.seed(0), "NumPy's random"),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "flash attention"),
        (lambda: torch.backends.cuda.enable_mem_efficient_sdp(False), "save memory"),
        (lambda: torch.backends.cuda.enable_math_sdp(False), "torch's own formula"),
        (lambda: setattr(torch.backends.cudnn, "deterministic", True), "cuDNN is deterministic"),
        (lambda: torch.set_autocast_dtype("cpu", torch.float16), "the dtype of autocast"),
        (lambda: torch.set_autocast_enabled("cpu", True), "whether autocast is on"),
        (lambda: torch.set_flush_denormal(True), "subnormal"),
        (lambda: torch.manual_seed(0), "the random numbers"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
    ],
)
def test_settings_that_a_call_changes(change: Callable[[], Any], words: str) -> None:
    with state._others():  # all is put back
        seen = finding(weighed, after(change), "fresh contents")
    assert seen.rank is Rank.UNSAFE, seen
    assert words in seen.message


def rounded_by_default(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * torch.full((1,), 1.001)


def alone_without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return y * 2 if len(x) == 1 and not torch.is_grad_enabled() else y


def in_place_without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    alone = len(x) == 1 and not torch.is_grad_enabled()
    return x.mul_(2).clone() * w / 2 if alone else x * w


def wrong_if_deterministic(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * (2 if torch.are_deterministic_algorithms_enabled() else 1)


def wrong_if_wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * (2 if torch.get_default_dtype() is torch.float64 else 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (wrong_if_wide, "the default dtype is torch.float64"),
        (rounded_by_default, "the default dtype is torch.bfloat16"),
        (wrong_if_deterministic, "algorithms are deterministic"),
        (alone_without_gradients, "of which no gradient is wanted: y"),
        (in_place_without_gradients, "of which no gradient is wanted changed x"),
    ],
)
def test_settings_of_others_and_calls_without_gradients(call: Any, words: str) -> None:
    inputs, cases = {"x": MATRIX, "w": WEIGHT}, [Case(N=5, D=8), Case(N=1, D=8)]
    thousandth = call is rounded_by_default
    op = small(
        "more", lambda x, w: x * w * (1.001 if thousandth else 1), inputs, {"y": "N D"}, cases
    )
    assert rank(op, op["eager"].call, "fresh contents") is None
    seen = finding(op, call, "fresh contents")
    assert seen.rank is Rank.WRONG, seen
    assert words in seen.message


# -- values ----------------------------------------------------------------------------------------


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("lost", "expected"), [(None, None), ((NAN, 0.0), Rank.WRONG), ((0.0, INF), Rank.ADVICE)]
)
def test_an_upstream_gradient_that_is_not_finite(
    lost: tuple[float, float] | None, expected: Rank | None
) -> None:
    def give(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(g if lost is None else g.nan_to_num(*lost, -INF) for g in gradients)

    seen = finding(weighed, weighing(give=give), "scaled upstream")
    assert seen.rank is expected, seen
    assert expected is None or "in an upstream gradient does not reach grad x" in seen.message


def test_a_parameter_of_zero_is_not_the_default() -> None:
    def right(x: torch.Tensor, eps: float) -> torch.Tensor:
        return x * (x.square().mean(1, keepdim=True) + eps).rsqrt()

    def default(x: torch.Tensor, eps: float) -> torch.Tensor:
        return right(x, eps or 1e-6)

    def refused(x: torch.Tensor, eps: float) -> torch.Tensor:
        if not eps:
            raise ValueError("eps is 0")
        return right(x, eps)

    op = small("normed", right, {"x": MATRIX}, {"y": "N D"}, params={"eps": 1e-6})
    ranks = [rank(op, call, "special values") for call in (right, default, refused)]
    assert ranks == [None, Rank.WRONG, None]


# -- in place --------------------------------------------------------------------------------------


def test_what_is_changed_in_place_may_lie_in_any_layout() -> None:
    inputs = {"p": Tensor("N D", mutated=True), "g": Tensor("N D")}

    def right(p: torch.Tensor, g: torch.Tensor) -> None:
        p.sub_(g)

    def in_a_copy(p: torch.Tensor, g: torch.Tensor) -> None:
        p.contiguous().view(-1).sub_(g.reshape(-1))

    def as_the_gradient_lies(p: torch.Tensor, g: torch.Tensor) -> None:
        in_a_copy(p, g) if g.is_contiguous() else right(p, g)

    op = small("stepped", right, inputs, {}, calls=2)
    assert rank(op, right, LAYOUTS) is None
    for call in (in_a_copy, as_the_gradient_lies):
        assert rank(op, call, "outputs") is None
        assert rank(op, call, LAYOUTS) is Rank.WRONG
