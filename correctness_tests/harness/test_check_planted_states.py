"""Faults that checks once passed: they show after an unusual first call, in another thread, in one
dtype, in place, with two settings at once, or in sizes and magnitudes that no case has."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import MATRIX, assert_found
from correctness_tests.support.tried import in_each_dtype as finding
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Outcome, Rank, run, sizes
from tinyllama.harness.declare.specs import FLOATS

T = torch.Tensor
Call = Callable[..., Any]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FEW = (1, 131, 259, 2051, 4096, 4099)


def declared(name: str, reference: Call, inputs: dict[str, Tensor], y: Any, **more: Any) -> Op:
    cases = more.pop("cases", [Case(N=5, D=16)])
    op = Op(name, inputs=inputs, outputs=y, cases=cases, **{"dtypes": FLOATS, **more})
    op.reference(reference)
    return op


def wide(x: T) -> T:
    return x.to(torch.promote_types(x.dtype, FP32))


# -- after an unusual first call -------------------------------------------------------------------


def powers(x: T, dtype: torch.dtype) -> T:
    return 0.9 ** torch.arange(x.shape[-1], dtype=dtype)


def decayed(x: T) -> T:
    return (wide(x) * powers(x, wide(x).dtype)).to(x.dtype)


decay = declared("decay", decayed, {"x": MATRIX}, {"y": "N D"}, dtypes=(FP32, BF16))


def keeping(make: Call, *, by: Call = lambda x: (x.shape, x.dtype), clean: bool = True) -> Call:
    """Powers that are made at the first call of a shape, and kept. clean: not of inference mode."""
    known: dict[Any, T] = {}

    def call(x: T) -> T:
        if by(x) not in known:
            with torch.inference_mode(torch.is_inference_mode_enabled() and not clean):
                known[by(x)] = make(x)
        return (wide(x) * known[by(x)].to(wide(x).dtype)).to(x.dtype)

    return call


def of_its_own_dtype(x: T) -> T:
    return powers(x, wide(x).dtype)


def by_a_product(x: T) -> T:
    made = of_its_own_dtype(x)
    return (torch.eye(len(made), dtype=made.dtype) @ made[:, None])[:, 0]


def of_default_dtype(x: T) -> T:
    return 0.9 ** (torch.arange(x.shape[-1]) * torch.ones(()))


# -- in another thread, in one dtype ---------------------------------------------------------------

doubled = declared("doubled", lambda x: 2 * x, {"x": MATRIX}, {"y": "N D"})
LOCAL = threading.local()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, backward: Call) -> T:
        LOCAL.factor = 2
        ctx.backward_of = backward
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return ctx.backward_of(upstream[0]), None


def with_backward(backward: Call) -> Call:
    return lambda x: Doubled.apply(x, backward)


def overflowing(gradient: T) -> T:
    return 64 * gradient / 32 if gradient.dtype is FP16 else 2 * gradient


weighed = declared("weighed", lambda x, w: x * w, {"x": MATRIX, "w": Tensor("D")}, {"y": "N D"})


def bits_of_w(x: T, w: T) -> T:
    """The memory of w is read in the dtype of x."""
    return x * w.contiguous().view(x.dtype)[: x.shape[-1]] if w.dtype is not x.dtype else x * w


def loses(rows: int, *, of: torch.dtype) -> Call:
    """Rows behind so many, in one dtype."""

    def call(x: T) -> T:
        return torch.cat([2 * x[:rows], 0 * x[rows:]]) if x.dtype is of else 2 * x

    return call


def tail_of_vectors(x: T) -> T:
    """A long row of 16 bits is written in vectors of 8."""
    whole = x.shape[-1] // 8 * 8
    left_out = x.element_size() == 2 and x.shape[-1] > 1024
    return torch.cat([2 * x[:, :whole], 0 * x[:, whole:]], -1) if left_out else 2 * x


# -- sizes, settings, magnitudes -------------------------------------------------------------------


def wrong_for(taken: Callable[[T], bool]) -> Call:
    return lambda x: (3 if taken(x) else 2) * x


cube = declared(
    "cube", lambda x: 2 * x, {"x": Tensor("N M D", grad=True)}, {"y": "N M D"},
    cases=[Case(N=3, M=4, D=16)],
)  # fmt: skip
SETTINGS = {"causal": True, "scale": 0.5}


def summed(x: T, causal: bool, scale: float) -> T:
    y = wide(x) * scale
    return (y.cumsum(-1) if causal else y + y.sum(-1, keepdim=True)).to(x.dtype)


scan = declared("scan", summed, {"x": MATRIX}, {"y": "N D"}, params=SETTINGS)


def forgets_scale(x: T, causal: bool, scale: float) -> T:
    return summed(x, causal, scale if causal else 0.5)


def one_block_unless_causal(x: T, causal: bool, scale: float) -> T:
    y = summed(x, causal, scale)
    return y if causal else torch.cat([y[:, :64], 0 * y[:, 64:]], -1)


least = declared("least", lambda x: x.amin(-1), {"x": MATRIX}, {"y": "N"})
PLAIN = {"x": Tensor("N D")}
floor = declared("floor", lambda x: x.floor(), PLAIN, {"y": "N D"}, dtypes=(FP32,))
unit = declared(
    "unit", lambda x: x / x.abs().amax(-1, keepdim=True).clamp_min(1e-30), PLAIN, {"y": "N D"},
    dtypes=(FP32,),
)  # fmt: skip


def padded_with_ten_thousand(x: T) -> T:
    return torch.nn.functional.pad(x, (0, 1), value=1e4).amin(-1)


def by_an_integer(x: T) -> T:
    down = x.nan_to_num(posinf=0, neginf=0).to(torch.int32).to(x.dtype)
    return torch.where(x.isfinite(), down - (down > x).to(x), x)


product = declared(
    "product", lambda a, b: (wide(a) @ wide(b)).to(a.dtype),
    {"a": Tensor("N K", grad=True), "b": Tensor("K D", grad=True)}, {"y": "N D"},
    cases=[Case(N=5, K=16, D=8)],
)  # fmt: skip


def one_for_nothing(a: T, b: T) -> T:
    return (wide(a) @ wide(b) + (0 if a.shape[1] else 1)).to(a.dtype)


# -- in place --------------------------------------------------------------------------------------


def added(p: T, g: T, rate: float) -> None:
    p.add_(g, alpha=rate)


step = declared(
    "step", added, {"p": Tensor("N D", mutated=True), "g": Tensor("N D")}, {}, params={"rate": 0.1}
)
KEPT: dict[Any, T] = {}


def of_kept(p: T, g: T, rate: float) -> None:
    key = g.data_ptr(), g._version
    if key not in KEPT:
        KEPT.clear()
        KEPT[key] = g.clone()
    p.add_(KEPT[key], alpha=rate)


PLANTED: list[tuple[str, str, Op, Call, str]] = [
    ("a table of inference mode", "fresh contents", decay, keeping(of_its_own_dtype, clean=False),
     "after a first call of this shape in inference mode: Inference tensors"),
    ("a table of autocast", "fresh contents", decay, keeping(by_a_product),
     "after a first call of this shape under autocast: y"),
    ("a table of the default dtype", "fresh contents", decay, keeping(of_default_dtype),
     "after a first call of this shape with another default dtype: y"),
    ("a table of the first dtype", "fresh contents", decay,
     keeping(lambda x: powers(x, x.dtype), by=lambda x: x.shape),
     "after a first call of this shape in another dtype: y"),
    ("a thread's own", "backward twice", doubled,
     with_backward(lambda g: getattr(LOCAL, "factor", 0) * g), "in another thread: x"),
    ("a loss scale", "scaled upstream", doubled, with_backward(overflowing),
     "with a loss scale of 8192: grad x"),
    ("bits of another dtype", "autocast", weighed, bits_of_w, "where x alone is torch.bfloat16: y"),
    ("rows in float16", "sizes", doubled, loses(64, of=FP16), "outputs: y"),
    ("vectors of 16 bits", "sizes", doubled, tail_of_vectors, "element error"),
    ("between 2,048 and 4,096", "sizes", doubled, wrong_for(lambda x: 2048 < x.shape[1] < 4096),
     "outputs: y"),
    ("between 128 and 256", "sizes", doubled, wrong_for(lambda x: 128 < x.shape[1] < 256),
     "outputs: y"),
    ("whole blocks of 2,048", "sizes", doubled, wrong_for(lambda x: x.shape[1] % 2048 == 0),
     "outputs: y"),
    ("three long axes", "sizes", cube, wrong_for(lambda x: min(x.shape) > 64), "outputs: y"),
    ("two settings", "special values", scan, forgets_scale, "causal = False, scale = 0.25: y"),
    ("a setting among blocks", "sizes", scan, one_block_unless_causal, "outputs: y"),
    ("a padding of 10,000", "special values", least, padded_with_ten_thousand, "x shifted far up"),
    ("integers of 32 bits", "special values", floor, by_an_integer, "x huge: y"),
    ("a guard of 1e-12", "special values", unit,
     lambda x: x / x.abs().amax(-1, keepdim=True).clamp_min(1e-12), "x tiniest: y"),
    ("a sum of nothing", "empty batch", product, one_for_nothing, "where K is 0, y"),
    ("a setting in place", "special values", step, lambda p, g, rate: added(p, g, 0.1), "rate = "),
    ("a clamp in place", "special values", step,
     lambda p, g, rate: added(p, g.clamp(-50, 50), rate), "g far apart: p"),
    ("an infinity in place", "special values", step,
     lambda p, g, rate: added(p, g.nan_to_num(), rate), "inf in g: no infinity reaches 1 elements"),
    ("kept in place", "fresh contents", step, of_kept, "on contents changed through .data: p"),
    ("unseen in place", "fresh contents", step,
     lambda p, g, rate: added(p.data, g, rate), "their version is the same"),
]  # fmt: skip
RIGHT = {(check, op.name): op for _, check, op, *_ in PLANTED}


@pytest.fixture(autouse=True)
def few_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*FEW} <= {*sizes.SIZES}
    given = getattr(request.node, "callspec", None)
    together = given is not None and given.params.get("op") is cube
    monkeypatch.setattr(sizes, "SIZES", (sizes.BOTH,) if together else FEW)


@pytest.mark.parametrize(
    ("check", "op", "call", "said"), [one[1:] for one in PLANTED], ids=[one[0] for one in PLANTED]
)
def test_a_planted_fault_is_found(check: str, op: Op, call: Call, said: str) -> None:
    assert_found(op, call, check, said)


@pytest.mark.parametrize(("check", "op"), [(check, op) for (check, _), op in RIGHT.items()])
def test_a_right_function_passes(check: str, op: Op) -> None:
    one = finding(op, op["eager"].call, check)
    assert one.outcome is Outcome.PASSED, one


def test_a_table_that_is_made_with_care_is_right_after_any_first_call() -> None:
    one = finding(decay, keeping(of_its_own_dtype), "fresh contents")
    assert one.outcome is Outcome.PASSED, one


def test_a_shape_that_is_wrong_in_any_case_is_not_told_as_of_its_first_call() -> None:
    def call(x: T) -> T:
        return decayed(x) * (1 if x.shape[-1] == 16 else 2)

    one = finding(decay, call, "fresh contents")
    assert "a first call of this shape" not in one.message, one


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "expected"), [("ieee", None), (None, Rank.ADVICE)])
def test_products_that_are_tf32_on_a_gpu_are_named(
    precision: str | None, expected: Rank | None
) -> None:
    pytest.importorskip("triton")
    from tinyllama.harness.kernels.launch import jit, tl

    @jit
    def square_kernel(x, y, N, PRECISION: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        inside = (row < N) & (column < N)
        seen = tl.load(x + row * N + column, mask=inside, other=0.0)
        product = tl.dot(seen, seen, input_precision=PRECISION)
        tl.store(y + row * N + column, product, mask=inside)

    def call(x: T) -> T:
        assert x.shape[0] == x.shape[1]
        x, y = x.contiguous(), x.new_empty(x.shape)
        square_kernel[(1,)](x, y, len(x), PRECISION=precision, SIZE=32)
        return y

    square = declared(
        "square", lambda x: x @ x, {"x": Tensor("N N")}, {"y": "N N"}, dtypes=(FP32,),
        cases=[Case(N=16)],
    )  # fmt: skip
    provider = Provider("square", "tried", call, (FP32,), requires=("triton",))
    (one,) = run(Candidate(square, provider), only=["fresh contents"])
    assert one.rank is expected, one
    assert expected is None or "as tl.dot's are without input_precision: y" in one.message


@pytest.mark.parametrize("of", ["N", "D"])
def test_a_number_that_is_one_is_a_constant_to_the_compiler(of: str) -> None:
    """It has no methods of a tensor."""
    pytest.importorskip("triton")
    from tinyllama.harness.kernels.launch import jit, tl

    @jit
    def double_kernel(x, y, N, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, BLOCK)
        at = tl.program_id(0) * D + column
        inside = (column < D) & (at < N.to(tl.int64) * D)
        tl.store(y + at, 2 * tl.load(x + at, mask=inside, other=0.0), mask=inside)

    def call(x: T) -> T:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        numbers = x.shape if of == "N" else (x.shape[0] + 1, x.shape[1])
        double_kernel[(len(x),)](x, y, *numbers, BLOCK=16)
        return y

    plain = declared("double", lambda x: 2 * x, PLAIN, {"y": "N D"}, dtypes=(FP32,))
    provider = Provider("double", "tried", call, (FP32,), requires=("triton",))
    (one,) = run(Candidate(plain, provider), only=["resources"])
    if one.outcome is Outcome.UNSUPPORTED:
        pytest.skip(one.message)
    assert (one.outcome is Outcome.FAILED) is (of == "N"), one
    assert of != "N" or ("does not compile" in one.message and "N1D16" in one.case)
