"""Faults that only unusual values show: in a later block, a tail, a state, or one input alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from correctness_tests.support.tried import MATRIX, assert_found, in_each_dtype, small
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Outcome, Rank, blocks, resizing, unusual
from tinyllama.harness.declare.values import Values, normal, uniform

T = torch.Tensor
Call = Callable[..., Any]
SPECIAL = "special values"
ROWS = [Case(N=4, D=64), Case(N=3, D=50)]
X = {"x": Tensor("N D")}
BLOCK = 128


# -- in a later block ------------------------------------------------------------------------------


def padded(x: T) -> T:
    return torch.stack(
        [x[:, :BLOCK].amax(1), *(b.amax(1).clamp(min=0) for b in x.split(BLOCK, 1)[1:])]
    ).amax(0)


def last_of_ties(x: T) -> T:
    parts = x.split(BLOCK, 1)
    of_part = torch.stack([part.amax(1) for part in parts])
    last = len(parts) - 1 - of_part.flip(0).argmax(0)
    at = torch.stack([part.argmax(1) for part in parts])
    return BLOCK * last + at.gather(0, last[None])[0]


def scaled(x: T) -> T:
    return torch.cat([part / part.abs().amax(1, keepdim=True) for part in x.split(64, 1)], 1)


def guarded(x: T) -> T:
    parts = ((part, part.abs().amax(1, keepdim=True)) for part in x.split(64, 1))
    return torch.cat([part / torch.where(most > 0, most, 1.0) for part, most in parts], 1)


def by_row(x: T) -> T:
    whole = (x == 0).all(1, keepdim=True)
    return torch.where(whole, 0.0, scaled(x))


LARGEST = small("largest", lambda x: x.amax(1), X, {"y": "N"}, ROWS)
FIRST = small("first", lambda x: x.argmax(1), X, {"i": Tensor("N", dtype=torch.int64)}, ROWS)
SCALED = small("scaled", guarded, X, {"y": "N D"}, ROWS)


@pytest.mark.parametrize(
    ("op", "call", "text"),
    [
        (LARGEST, padded, "x all negative: y"),
        (FIRST, last_of_ties, "x with ties: i"),
        (SCALED, by_row, "x zero in a block: y"),
    ],
    ids=["padding", "ties", "a group of zeros"],
)
def test_a_later_block_has_such_values_too(
    monkeypatch: pytest.MonkeyPatch, op: Op, call: Call, text: str
) -> None:
    case = assert_found(op, call, SPECIAL, text).case
    assert f"D{blocks.LONG[0]}" in case


# -- in a tail ------------------------------------------------------------------------------------

SOFTPLUS = small("softplus", lambda x: functional.softplus(x), X, {"y": "N D"}, ROWS)
SIGMOID = small("sigmoid", lambda x: x.sigmoid(), X, {"y": "N D"}, ROWS)
MINUS = small("minus", lambda x: (-x).sigmoid(), X, {"y": "N D"}, ROWS)


def of_lost_terms(x: T) -> T:
    """An exponential below the rounding of 1 is lost."""
    return torch.where(x > 20, x, torch.log(1 + x.clamp(max=20).exp()))


@pytest.mark.parametrize(
    ("op", "call", "text"),
    [
        (SOFTPLUS, of_lost_terms, "x in the lower tail"),
        (SIGMOID, lambda x: 1 - 1 / (1 + x.exp()), "x in the lower tail"),
        (MINUS, lambda x: 1 - x.sigmoid(), "x in the upper tail"),
    ],
    ids=["lost terms", "a difference from 1", "above"],
)
def test_to_lose_results_that_are_small_beside_1_is_advice(op: Op, call: Call, text: str) -> None:
    """Triton has no log1p but a library's, so many right kernels compute log(1 + exp(-|x|))."""
    one = in_each_dtype(op, call, SPECIAL)
    assert one.rank is Rank.ADVICE
    assert one.message.startswith(f"{text}, results that are small beside 1 are lost: y: ")


def test_what_is_wrong_in_a_tail_alone_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unusual, "KINDS", {})
    call = lambda x: functional.softplus(x) + (x > 15) * 1e-3  # noqa: E731
    assert_found(SOFTPLUS, call, SPECIAL, "x in the upper tail: y")


def test_a_small_gradient_may_be_that_of_a_difference_from_1() -> None:
    op = small("elu", lambda x: functional.elu(x), {"x": MATRIX}, {"y": "N D"}, ROWS)
    call = lambda x: torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))  # noqa: E731
    assert in_each_dtype(op, call, SPECIAL).outcome is Outcome.PASSED


# -- in a state ------------------------------------------------------------------------------------


def step(p: T, g: T, m: T, v: T, root: Call, direction: Call) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.sub_(1e-3 * direction(m) / root(v))


def stepped(p: T, g: T, m: T, v: T) -> None:
    step(p, g, m, v, lambda v: v.sqrt() + 1e-8, lambda m: m + m.sign())


def of_signs(p: T, g: T, m: T, v: T) -> None:
    """Where there was no gradient yet it takes a step."""
    step(p, g, m, v, lambda v: v.sqrt() + 1e-8, lambda m: m + torch.where(m > 0, 1.0, -1.0))


def under_the_root(p: T, g: T, m: T, v: T) -> None:
    step(p, g, m, v, lambda v: (v + 1e-8).sqrt(), lambda m: m + m.sign())


STATES = {
    "p": Tensor("N", mutated=True),
    "g": Tensor("N"),
    "m": Tensor("N", mutated=True, values=normal(0.1)),
    "v": Tensor("N", mutated=True, values=uniform(0.0, 1.0)),
}
STEPPED = small("stepped", stepped, STATES, {}, [Case(N=30), Case(N=7)])


@pytest.mark.parametrize(
    ("call", "text"),
    [(of_signs, "p and g and m and v all zero: p"), (under_the_root, " tiny: p")],
    ids=["a sign of zero", "an epsilon under a root"],
)
def test_a_state_may_be_zero_or_tiny(call: Call, text: str) -> None:
    assert_found(STEPPED, call, SPECIAL, text)


def test_a_state_of_8_bits_is_made_zero_and_tiny() -> None:
    def faded(m: T) -> None:
        m.copy_((m.float() / 2).to(m.dtype))

    state = Tensor("N", mutated=True, dtype=torch.float8_e5m2, values=normal())
    op = small("faded", faded, {"m": state}, {}, [Case(N=9)])
    provider = Provider(op.name, "tried", op["eager"].call, (torch.float32,))
    candidate = Candidate(op, provider)
    (what, _, inputs), *_ = blocks.in_states(candidate, resizing.general(candidate))
    assert what == "m all zero"
    assert not inputs.args["m"].float().any()


def clipped(x: T, squares: Call) -> None:
    x.mul_((1 / squares(x).sum().sqrt()).clamp(max=1.0).to(x.dtype))


def of_wide_squares(x: T) -> None:
    clipped(x, lambda x: x.float().square())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: clipped(x, lambda x: x.square().float()), "x 1000 times as large: x"),
        (lambda x: clipped(x, lambda x: x.float().clamp(-9, 9).square()), "x 64 times as large: x"),
    ],
    ids=["squares in float16", "clamped"],
)
def test_what_is_changed_in_place_may_be_large(call: Call, text: str) -> None:
    op = small("clipped", of_wide_squares, {"x": Tensor("N", mutated=True)}, {}, [Case(N=40)])
    op.dtypes = (torch.float32, torch.float16)
    assert_found(op, call, SPECIAL, text)


@pytest.mark.parametrize(("calls", "good"), [(2, True), (1, False)])
def test_a_second_call_may_make_a_nan_of_an_infinity(calls: int, good: bool) -> None:
    def averaged(m: T, g: T) -> None:
        m.mul_(0.9).add_(0.1 * g)

    def interpolated(m: T, g: T) -> None:
        m.lerp_(g, 0.1)
        m.lerp_(m.clone() if calls == 1 else g, 0.0)

    inputs = {"m": Tensor("N", mutated=True), "g": Tensor("N")}
    op = small("mean", averaged, inputs, {}, [Case(N=9)], calls=calls)
    assert (in_each_dtype(op, interpolated, SPECIAL).outcome is Outcome.PASSED) is good


def test_a_small_step_depends_on_a_parameter_too() -> None:
    """A correction that is computed once, of the first step that comes."""
    first: dict[None, float] = {}

    def corrected(p: T, g: T, step: int) -> None:
        p.sub_(1e-3 * g / (1 - 0.9**step))

    def kept(p: T, g: T, step: int) -> None:
        p.sub_(1e-3 * g / first.setdefault(None, 1 - 0.9**step))

    inputs = {"p": Tensor("N", mutated=True), "g": Tensor("N")}
    op = small("corrected", corrected, inputs, {}, [Case(N=30), Case(N=7)], params={"step": 3})
    assert_found(op, kept, SPECIAL, "step = 4: p")


# -- one input, one parameter ----------------------------------------------------------------------


def trusted(p: T, u: T, *, guarded: bool) -> T:
    a, b = p.norm(), u.norm()
    return p - torch.where((b > 0) & ((a > 0) | (not guarded)), a / b, 1.0) * u


def clamped(x: T, eps: float) -> T:
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)


def never_clamped(grad: T, x: T, eps: float) -> T:
    n = x.norm(dim=-1, keepdim=True).clamp(min=eps)
    y = x / n
    return (grad - y * (grad * y).sum(-1, keepdim=True)) / n


def test_what_padding_holds_does_not_matter() -> None:
    """A weight of zero times an infinity is a NaN, also where the reference's gradient is one."""

    def pooled(x: T, v: T, lens: T) -> T:
        keep = torch.arange(x.shape[1]) < lens[:, None]
        weights = torch.softmax(x.masked_fill(~keep, -torch.inf), 1)
        return (weights * v.masked_fill(~keep, 0)).sum(1)

    def weighted(x: T, v: T, lens: T) -> T:
        keep = torch.arange(x.shape[1]) < lens[:, None]
        return (torch.softmax(x.masked_fill(~keep, -torch.inf), 1) * v).sum(1)

    def within(shape: tuple[int, ...], made: torch.Generator) -> T:
        return torch.randint(5, 8, shape, generator=made)

    lens = Tensor("N", dtype=torch.int64, values=Values("within", within))
    cases = [Case(N=4, D=8), Case(N=3, D=9)]
    op = small("pooled", pooled, {**X, "v": Tensor("N D"), "lens": lens}, {"y": "N"}, cases)
    assert_found(op, weighted, SPECIAL, "on which no output depends: a NaN reaches y")
    assert in_each_dtype(op, pooled, SPECIAL).rank is None


def test_what_is_between_the_ends_of_a_permutation_is_moved() -> None:
    def moved(x: T, at: T) -> T:
        return x[at]

    def by_ends(x: T, at: T) -> T:
        return x.clone() if at[0] == 0 and at[-1] == len(at) - 1 else x[at]

    def permuted(shape: tuple[int, ...], made: torch.Generator) -> T:
        return torch.randperm(*shape, generator=made)

    at = Tensor("N", dtype=torch.int64, values=Values("permutation", permuted))
    op = small("moved", moved, {**X, "at": at}, {"y": "N D"}, [Case(N=9, D=8), Case(N=7, D=5)])
    assert_found(op, by_ends, SPECIAL, "at in order but between its ends: y")
    assert in_each_dtype(op, lambda x, at: x.index_select(0, at), SPECIAL).rank is None


def test_an_element_equals_a_parameter() -> None:
    """The last bin of a histogram has both of its edges."""

    def below(x: T, high: float) -> T:
        return (x < high).sum(1)

    op = small("below", below, X, {"n": Tensor("N", dtype=torch.int64)}, ROWS, params={"high": 6.5})
    assert in_each_dtype(op, lambda x, high: (-x > -high).sum(1), SPECIAL).rank is None
    text = "x with the values of parameters: n"
    assert_found(op, lambda x, high: (x <= high).sum(1), SPECIAL, text)


def test_values_are_so_close_that_one_is_in_each_gap() -> None:
    def gate(x: T) -> T:
        return torch.sigmoid(x)

    def gap(x: T) -> T:
        return torch.where((x > 6.35) & (x < 6.375), 0.5, gate(x))

    op = small("gate", gate, X, {"y": "N D"}, ROWS)
    assert_found(op, gap, SPECIAL, "x evenly spaced: y")
    assert in_each_dtype(op, lambda x: 1 / (1 + (-x).exp()), SPECIAL).rank is None


def test_bfloat16_is_beyond_the_range_of_float16() -> None:
    """Code for chips without bfloat16."""

    def halved(x: T) -> T:
        return x.half().to(x.dtype) * 2 if x.dtype is torch.bfloat16 else x * 2

    op = Op(
        "two", inputs=X, outputs={"y": "N D"}, cases=ROWS, dtypes=(torch.float32, torch.bfloat16)
    )
    op.reference(lambda x: x * 2)
    assert "bf16" in assert_found(op, halved, SPECIAL, "x huge: y").case
    assert in_each_dtype(op, lambda x: x + x, SPECIAL).rank is None


def test_one_input_is_zero_beside_others_that_are_not() -> None:
    """Parameters that are zero still move."""
    inputs = {"p": Tensor("N D"), "u": Tensor("N D")}
    op = small("trusted", lambda p, u: trusted(p, u, guarded=True), inputs, {"y": "N D"}, ROWS)
    assert_found(op, lambda p, u: trusted(p, u, guarded=False), SPECIAL, "p all zero: y")


def test_a_bound_is_so_large_that_each_row_reaches_it() -> None:
    class Clamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, eps: float) -> T:
            ctx.save_for_backward(x)
            ctx.eps = eps
            return clamped(x, eps)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            return never_clamped(grads[0], x, ctx.eps), None

    inputs, params = {"x": Tensor("N D", grad=True)}, {"eps": 1e-12}
    op = small("clamped", clamped, inputs, {"y": "N D"}, ROWS, params=params)
    # apply() of older torch takes no keyword arguments
    assert_found(op, lambda x, eps: Clamped.apply(x, eps), SPECIAL, "eps = 100.0: grad x")
