"""Faults that checks once passed: they show for one value in one place, in one row, or equal to
another input's; for whole numbers that no author had in mind; in a layout of channels; or where an
axis has one, two or three entries."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import MATRIX, assert_found, in_each_dtype, with_backward
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import Outcome, Rank, sizes
from tinyllama.harness.declare.values import Values, normal, uniform

T = torch.Tensor
Call = Callable[..., Any]
FP32, FP16 = torch.float32, torch.float16
SPECIAL, LAYOUTS, SIZES = "special values", "input layouts", "sizes"
FEW = (1, 2, 3, sizes.OF_SUMS)
COINS = Values("coins", lambda shape, made: torch.rand(shape, generator=made) < 0.5)
MASK = Tensor("N D", dtype=torch.bool, values=COINS)
ROWS = {"y": "N"}


def declared(name: str, reference: Call, inputs: Any, y: Any, **more: Any) -> Op:
    op = Op(
        name, inputs=inputs, outputs=y, **{"cases": [Case(N=4, D=12)], "dtypes": (FP32,), **more}
    )
    op.reference(reference)
    return op


# -- a gradient of a product, a norm, and a norm's weight, at zero ---------------------------------


def product_gradient(gradient: T, x: T) -> T:
    return (gradient * x.cumprod(-1)).flip(-1).cumsum(-1).flip(-1) / x


def norm(x: T) -> T:
    return torch.linalg.vector_norm(x, dim=-1)


product = declared("product", lambda x: x.cumprod(-1), {"x": MATRIX}, {"y": "N D"})
length = declared("length", norm, {"x": MATRIX}, ROWS)
WEIGHT = Tensor("D", grad=True, values=normal(0.5, mean=1.0))
weighed = declared("weighed", lambda x, w: x.square() * w, {"x": MATRIX, "w": WEIGHT}, {"y": "N D"})


def from_the_output(gradient: T, x: T, w: T) -> Any:
    squared = (x.square() * w) / w  # of a saved output
    return 2 * gradient * w * squared.sqrt() * x.sign(), (gradient * squared).sum(0)


# -- a mask, a length, a boundary, a row -----------------------------------------------------------

kept = declared("kept", lambda x, keep: (x * keep).sum(-1), {"x": MATRIX, "keep": MASK}, ROWS)


def as_the_first(x: T, keep: T) -> T:
    return torch.where(keep[:1].all(), x.sum(-1), (x * keep).sum(-1))


def nan_behind_nothing(x: T, keep: T) -> T:
    """A block of 64 of which nothing is kept is a NaN, unless it is the only one."""
    lost = ~keep[:, :64].any(-1) & (x.shape[-1] > 64)
    return (x * keep).sum(-1).masked_fill(lost, math.nan)


SORTED = Values("sorted", lambda shape, made: torch.randn(shape, generator=made).sort().values)
EDGES = {"x": Tensor("N D"), "edges": Tensor("E", values=SORTED)}
BUCKETS = {"y": Tensor("N D", dtype=torch.int64)}
CASES = [Case(N=4, D=12, E=9)]


def bucket(x: T, edges: T) -> T:
    return (x[..., None] >= edges).sum(-1)


bucketed = declared("bucketed", bucket, EDGES, BUCKETS, cases=CASES)


softmax = declared("softmax", lambda x: x.softmax(-1), {"x": Tensor("N D")}, {"y": "N D"})
highest = declared(
    "highest", lambda x: x.argmax(-1), {"x": Tensor("N D")}, {"i": Tensor("N", dtype=torch.int64)}
)


def none_at_first(x: T) -> T:
    return torch.where((x > -math.inf).any(-1), x.argmax(-1), -1)


def entropy(p: T) -> T:
    return -torch.special.xlogy(p, p).sum(-1)


PROBABILITY = {"p": Tensor("N D", values=uniform(0.0, 1.0))}
entropies = declared("entropies", entropy, PROBABILITY, ROWS)


# -- parameters ------------------------------------------------------------------------------------


def unit(x: T, eps: float) -> T:
    wide = x.to(torch.promote_types(x.dtype, FP32))
    return (wide / (norm(wide)[:, None] + eps)).to(x.dtype)


def unit_in_its_dtype(x: T, eps: float) -> T:
    return (x.float() / (norm(x.float())[:, None].to(x.dtype) + eps).float()).to(x.dtype)


units = declared(
    *("units", unit, {"x": Tensor("N D")}, {"y": "N D"}), dtypes=(FP32, FP16), params={"eps": 1e-8}
)


def softplus(x: T, beta: float) -> T:
    return torch.nn.functional.softplus(x, beta)


def threshold_of_x(x: T, beta: float) -> T:
    return torch.where(x > 20, x, (x * beta).exp().log1p() / beta)


smooth = declared("smooth", softplus, {"x": Tensor("N D")}, {"y": "N D"}, params={"beta": 1.0})


def power(x: T, gamma: float) -> T:
    return torch.sigmoid(-x) ** gamma


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, gamma: float) -> T:
        ctx.save_for_backward(x)
        ctx.gamma = gamma
        return power(x, gamma)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), gamma = ctx.saved_tensors, ctx.gamma
        q = torch.sigmoid(-x)
        return -gradients[0] * gamma * q ** (gamma - 1) * q * torch.sigmoid(x), None


powers = declared("powers", power, {"x": MATRIX}, {"y": "N D"}, params={"gamma": 2.0})


def drawn(x: T, seed: int) -> T:
    return x * ((torch.arange(x.numel()).view(x.shape) * 7919 + seed * 31) % 5 > 1)


def none_for_zero(x: T, seed: int) -> T:
    return drawn(x, seed) if seed else x


seeded = declared("seeded", drawn, {"x": Tensor("N D")}, {"y": "N D"}, params={"seed": 7})


def roll(x: T, shift: int) -> T:
    return x.roll(shift, -1)


def rolled_once(x: T, shift: int) -> T:
    source = torch.arange(x.shape[-1]) + x.shape[-1] - shift
    taken = x[:, source.clamp(min=0) % max(x.shape[-1], 1)]
    return torch.where(source < 0, 0.0, taken)


turned = declared("turned", roll, {"x": Tensor("N D")}, {"y": "N D"}, params={"shift": 2})


# -- layouts and short axes ------------------------------------------------------------------------


def biased(x: T, bias: T) -> T:
    return x + bias[:, None, None]


images = declared(
    *("images", biased, {"x": Tensor("B C H W"), "bias": Tensor("C")}, {"y": "B C H W"}),
    cases=[Case(B=2, C=6, H=4, W=5)],
)


def without_bias_for_channels_last(x: T, bias: T) -> T:
    inner = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x + 0 * bias[0] if inner else biased(x, bias)


def of_its_first_stride(x: T) -> T:
    """Rows as long as the first stride of what is contiguous."""
    if not x.numel():
        return x
    rows = x.contiguous().as_strided((x.numel() // x.stride(0), x.stride(0)), (x.stride(0), 1))
    return rows.softmax(-1).view(x.shape) if x.is_contiguous() else x.softmax(-1)


def slope(x: T) -> T:
    inner = (x[:, 2:] - x[:, :-2]) / 2
    return (
        torch.cat([x[:, 1:2] - x[:, :1], inner, x[:, -1:] - x[:, -2:-1]], -1)
        if len(x.T) > 1
        else 0 * x
    )


slopes = declared("slopes", slope, {"x": Tensor("N D")}, {"y": "N D"})


def slope_of_three(x: T) -> T:
    return slope(x) if x.shape[-1] != 2 else slope(x) * x.new_tensor([1.0, 0.0])


BYTES = Values("bytes", lambda shape, made: torch.randint(-128, 128, shape, generator=made))
FACTORS = {n: Tensor(x, dtype=torch.int8, values=BYTES) for n, x in (("a", "M K"), ("b", "K N"))}


def of_bytes(a: T, b: T) -> T:
    return a.long() @ b.long()


def in_float32(a: T, b: T) -> T:
    return (a.float() @ b.float()).long()


products = declared(
    *("products", of_bytes, FACTORS, {"y": Tensor("M N", dtype=torch.int64)}),
    cases=[Case(M=3, K=8, N=2)],
)

FOUND: list[tuple[str, str, Op, Call, str]] = [
    ("a gradient of a product at zero", SPECIAL, product,
     with_backward(lambda x: x.cumprod(-1), product_gradient, once=True), "x all zero: grad x"),
    ("a gradient that is a NaN where others choose", SPECIAL, length,
     with_backward(norm, lambda g, x: g[:, None] * x / norm(x)[:, None], once=True), "x all zero"),
    ("a weight of zero", SPECIAL, weighed,
     with_backward(lambda x, w: x.square() * w, from_the_output, once=True), "a zero in w: grad x"),
    ("a zero in a domain", SPECIAL, entropies, lambda p: -(p * p.log()).sum(-1), "a zero in p: y"),
    ("the first row of a mask", SPECIAL, kept, as_the_first, "keep all True in its first row: y"),
    ("a block of a mask", SPECIAL, kept, nan_behind_nothing, "half a row of keep is False: y"),
    ("at a boundary", SPECIAL, bucketed, lambda x, edges: (x[..., None] > edges).sum(-1),
     "values of edges in x: y"),
    ("a row of infinities", SPECIAL, highest, none_at_first, "i has an index beyond each axis"),
    ("a small number in float16", SPECIAL, units, unit_in_its_dtype, "x all zero: y"),
    ("a large factor", SPECIAL, smooth, threshold_of_x, "beta = 64.0: y"),
    ("a power of zero, far apart", SPECIAL, powers, lambda x, gamma: Power.apply(x, gamma),
     "gamma = 0.0: grad x"),
    ("a seed of zero", SPECIAL, seeded, none_for_zero, "seed = 0: y"),
    ("channels", LAYOUTS, images, without_bias_for_channels_last, "outputs: y"),
    ("the stride of one row", SIZES, softmax, of_its_first_stride, "outputs: "),
    ("sums beyond 2^24", SIZES, products, in_float32, "outputs: y"),
    ("two points", SIZES, slopes, slope_of_three, "outputs: y"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*FEW} <= {*sizes.SIZES}
    monkeypatch.setattr(sizes, "SIZES", FEW)


GIVEN = [pytest.param(*one[1:], id=one[0]) for one in FOUND]


@pytest.mark.parametrize(("check", "op", "call", "said"), GIVEN)
def test_a_planted_fault_is_found(check: str, op: Op, call: Call, said: str) -> None:
    assert_found(op, call, check, said)


EACH = {(check, op.name): op for _, check, op, _, _ in FOUND}


@pytest.mark.parametrize(("check", "op"), [(check, op) for (check, _), op in EACH.items()])
def test_a_right_function_passes(check: str, op: Op) -> None:
    one = in_each_dtype(op, op["eager"].call, check)
    assert one.outcome is Outcome.PASSED, one


def test_a_shift_beyond_an_axis_is_advice() -> None:
    one = in_each_dtype(turned, rolled_once, SPECIAL)
    assert one.rank is Rank.ADVICE
    assert one.message.startswith("shift = 99: y: ")
    assert in_each_dtype(turned, roll, SPECIAL).outcome is Outcome.PASSED


def test_what_may_be_refused_is_no_fault() -> None:
    def refusing(x: T, shift: int) -> T:
        if not 0 < shift < 50:
            raise ValueError("shift must be in a row")
        return roll(x, shift)

    assert in_each_dtype(turned, refusing, SPECIAL).outcome is Outcome.PASSED


def test_an_axis_without_entries_may_give_whole_or_infinite_numbers() -> None:
    outputs = {"y": "N", "n": Tensor("N", dtype=torch.int64)}
    op = declared("both", lambda x: (x.logsumexp(-1), (x > 0).sum(-1)), {"x": MATRIX}, outputs)
    assert in_each_dtype(op, op["eager"].call, "empty batch").outcome is Outcome.PASSED

    def one_too_many(x: T) -> Any:
        y, n = op["eager"].call(x)
        return y, n + (x.shape[-1] == 0)

    def finite(x: T) -> Any:
        y, n = op["eager"].call(x)
        return y if x.shape[-1] else y.clamp(min=0), n

    for call in (one_too_many, finite):
        assert "where D is 0" in in_each_dtype(op, call, "empty batch").message
