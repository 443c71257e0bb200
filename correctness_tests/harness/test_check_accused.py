"""Right code that checks called wrong: infinities and NaNs that the reference has, too, outputs of
booleans and of few bits, what the reference or a distribution raises, sums of equal terms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.tried import MATRIX, finding, found, small
from tinyllama.harness import Case, Tensor
from tinyllama.harness.correct import reference
from tinyllama.harness.correct.checks import Outcome, Rank, unusual
from tinyllama.harness.correct.compare import Reference, compare
from tinyllama.harness.correct.evaluate import make_inputs
from tinyllama.harness.declare.values import Values, integers

T = torch.Tensor
PASSED, FAILED, BLOCKED = Outcome.PASSED, Outcome.FAILED, Outcome.BLOCKED
INF, NAN = math.inf, math.nan
PLAIN = Tensor("N D")

# -- what is not finite ---------------------------------------------------------------------------

RIGHT = [1.0, -INF, INF, NAN, 2.0]


@pytest.mark.parametrize(
    ("result", "failing"),
    [
        (RIGHT, []),
        ([1.0, INF, INF, NAN, 2.0], ["tensor", "row"]),
        ([1.0, -3e38, INF, NAN, 2.0], ["tensor", "row"]),
        ([1.0, -INF, NAN, NAN, 2.0], ["tensor", "row"]),
        ([1.0, -INF, INF, INF, 2.0], ["tensor", "row"]),
        ([1.0, -INF, INF, 0.0, 2.0], ["tensor", "row"]),
        ([1.01, -INF, INF, NAN, 2.0], ["tensor", "row", "scale"]),
        ([INF, -INF, INF, NAN, 2.0], ["tensor", "row", "scale"]),
        ([0.0, 0.0, 0.0, 0.0, 0.0], ["tensor", "row", "scale"]),
    ],
)
def test_what_is_not_finite_is_equal_and_norms_are_of_the_rest(
    result: list[float], failing: list[str]
) -> None:
    oracle = torch.tensor(RIGHT, dtype=torch.float64)
    known = Reference(oracle.float(), oracle, [oracle * (1 + 1e-8), oracle])
    found = compare("y", torch.tensor(result), known, of_elements=8.0)
    assert [one.norm for one in found.checks if not one.passed and one.norm != "element"] == failing
    assert found.checks[-1].passed == (not failing)
    assert all(math.isfinite(one.bound) for one in found.checks)
    assert found.sees_zero


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [
        (INF, 2.0, True),
        (65504.0, 2.0, True),
        (-INF, 2.0, False),
        (NAN, 2.0, False),
        (INF, 2.1, False),
    ],
)
def test_where_the_reference_alone_overflows_either_is_right(
    first: float, second: float, right: bool
) -> None:
    oracle = torch.tensor([1e5, 2.0], dtype=torch.float64)
    found = compare(
        "y", torch.tensor([first, second]).half(), Reference(oracle.half(), oracle, [oracle])
    )
    assert found.passed is right, found


def test_a_draw_that_is_not_finite_says_nothing() -> None:
    oracle = torch.tensor([1.0, 2.0], dtype=torch.float64)
    known = Reference(oracle.float(), oracle, [torch.tensor([NAN, 2.0]).double()])
    assert compare("y", oracle.float(), known).passed
    assert not compare("y", oracle.float() * 1.001, known).passed


KEEP = Tensor("N D", dtype=torch.bool, values=integers(2))


def log_sum(x: T, keep: T) -> T:
    return x.masked_fill(~keep, -INF).logsumexp(-1)


def of_shifted(x: T, keep: T) -> T:
    """NaN where all of a row is left out."""
    kept = x.masked_fill(~keep, -INF)
    most = kept.amax(-1, keepdim=True).detach()
    return (kept - most).exp().sum(-1).log() + most[:, 0]


# Of three elements all are left out in some rows.
masked = small(
    "masked",
    log_sum,
    {"x": MATRIX, "keep": KEEP},
    {"y": "N"},
    [Case(N=24, D=3), Case(N=4, D=40)],
)


OF_RESULTS = ["outputs", "gradients", "input layouts", "scaled upstream", "backward twice", "sizes"]
OF_RESULTS += ["fresh contents", "special values", "compiled", "empty batch", "second derivative"]


@pytest.mark.parametrize("check", OF_RESULTS)
def test_an_infinity_that_the_reference_has_is_right(check: str) -> None:
    assert torch.isinf(log_sum(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))).all()
    one = finding(masked, lambda x, keep: torch.where(keep, x, -INF).logsumexp(-1), check)
    assert one.outcome is PASSED, one


@pytest.mark.parametrize(
    "wrong",
    [of_shifted, lambda x, keep: -log_sum(-x, keep), lambda x, keep: log_sum(x, keep).clamp(-1e30)],
    ids=["NaN", "other sign", "finite"],
)
def test_another_value_than_the_infinity_is_found(wrong: Callable[[T, T], T]) -> None:
    assert finding(masked, wrong, "outputs").outcome is FAILED


def test_a_nan_that_the_reference_has_does_not_hide_memory_that_is_not_written() -> None:
    def shares(x: T) -> T:
        return x.relu() / x.relu().sum(-1, True)

    def skips(x: T) -> T:
        y = torch.empty(x.shape)
        y[:, 1:] = shares(x)[:, 1:]
        return y

    negative = Values("negative", lambda shape, _: -torch.ones(shape).double())
    op = small("shares", shares, {"x": Tensor("N D", values=negative)}, {"y": "N D"})
    checks = "outputs", "unwritten memory"
    assert {one.outcome for one in found(op, lambda x: shares(x), *checks).values()} == {PASSED}
    findings = found(op, skips, *checks)
    assert [findings[one].outcome for one in checks] == [FAILED, FAILED]
    assert "5 of 40 elements" in findings["unwritten memory"].message


def test_independent_code_may_give_the_same_infinity_and_booleans() -> None:
    both = small(
        "both",
        lambda x, keep: (log_sum(x, keep), keep.any(-1)),
        {"x": PLAIN, "keep": KEEP},
        {"y": "N", "some": Tensor("N", dtype=torch.bool)},
        [Case(N=24, D=3)],
    )
    both.independent("where")(
        lambda x, keep: (torch.where(keep, x, -INF).logsumexp(-1), keep.sum(-1) > 0)
    )
    both.independent("shifted")(lambda x, keep: (of_shifted(x, keep), ~keep.any(-1)))
    inputs = make_inputs(both, both.cases[0], torch.float64)
    assert reference.disagreements(both, "where", inputs) == []
    assert len(reference.disagreements(both, "shifted", inputs)) == 2


# -- outputs of few bits --------------------------------------------------------------------------

FLAG, FP8 = Tensor("", dtype=torch.bool), torch.float8_e4m3fn
ALL = ["outputs", "input layouts", "determinism", "fresh contents", "sizes", "special values"]
ALL += ["empty batch", "autocast", "compiled"]


def unscaled(x: T) -> Any:
    return x * 0.5, ~torch.isfinite(x).all()


unscale = small("unscale", unscaled, {"x": PLAIN}, {"y": "N D", "found": FLAG})
to_fp8 = small(
    "to_fp8",
    lambda x: (x, x.to(x.dtype if x.dtype is torch.float64 else FP8)),
    {"x": PLAIN},
    {"same": "N D", "y": Tensor("N D", dtype=FP8)},
)
to_uint16 = small(
    "to_uint16",
    lambda x: (x + 1, (x.abs() * 10).clamp(0, 1000).to(torch.uint16)),
    {"x": PLAIN},
    {"more": "N D", "y": Tensor("N D", dtype=torch.uint16)},
)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (unscale, lambda x: (x / 2, (~x.isfinite()).any())),
        (to_fp8, lambda x: (x.clone(), x.to(FP8))),
        (to_uint16, lambda x: (1 + x, (x.abs() * 10).clamp(0, 1000).to(torch.uint16))),
    ],
    ids=["bool", "float8", "uint16"],
)
def test_outputs_of_few_bits_are_compared(op: Any, call: Callable[[T], Any]) -> None:
    findings = found(op, call, *ALL)
    bad = [one for one in findings.values() if not one.outcome.good and one.rank is not Rank.ADVICE]
    assert not bad, bad
    assert findings["special values"].outcome is not Outcome.CRASHED

    def other(x: T) -> Any:
        y, z = call(x)
        return y, ~z if z.dtype is torch.bool else torch.zeros_like(z)

    assert finding(op, other, "outputs").outcome is FAILED


def test_a_flag_that_tells_of_an_infinity_is_to_tell_of_a_nan() -> None:
    one = finding(unscale, lambda x: (x * 0.5, torch.isinf(x).any()), "special values")
    assert one.rank is Rank.WRONG, one
    assert one.message == "found tells of an infinity in x, and not of a NaN"
    positive = small(
        "positive", lambda x: x > 0, {"x": PLAIN}, {"y": Tensor("N D", dtype=torch.bool)}
    )
    one = finding(positive, lambda x: ~(x <= 0), "special values")
    assert one.rank is Rank.ADVICE, one
    assert "a NaN in x leads to other values" in one.message
    one = finding(positive, lambda x: (x > 0) & (x < 1e30), "special values")
    assert one.rank is Rank.WRONG, one


def test_a_nan_is_followed_into_indices_and_not_into_what_is_quantised() -> None:
    def most(x: T) -> T:
        return x.argmax(-1)

    index = small("most", most, {"x": PLAIN}, {"y": Tensor("N", dtype=torch.int64)})
    one = finding(index, lambda x: most(x.nan_to_num(-INF)), "special values")
    assert one.rank is Rank.ADVICE, one
    assert "a NaN in x leads to other values" in one.message
    assert finding(index, lambda x: most(x), "special values").outcome is PASSED

    def quantised(x: T) -> T:
        return x.clamp(-9, 9).to(torch.int8)

    to_int8 = small("to_int8", quantised, {"x": PLAIN}, {"y": Tensor("N D", dtype=torch.int8)})
    one = finding(to_int8, lambda x: quantised(x.nan_to_num(3.0)), "special values")
    assert one.outcome is PASSED, one


# -- what others raise ----------------------------------------------------------------------------


def of_some(x: T) -> T:
    if not x.any():
        raise RuntimeError("nothing to normalise")
    return x / x.norm()


def test_inputs_that_the_reference_refuses_are_named_and_others_are_tried() -> None:
    norm = small("norm", of_some, {"x": PLAIN}, {"y": "N D"})
    one = finding(norm, lambda x: x / x.square().sum().sqrt(), "special values")
    assert one.outcome is PASSED, one
    assert (
        "x all zero, of which the reference raised an error: RuntimeError: nothing" in one.message
    )
    one = finding(norm, lambda x: x / x.square().sum().sqrt().clamp(0.01), "special values")
    assert one.outcome is FAILED


def test_gradients_are_asked_of_inputs_that_declare_one() -> None:
    def normalised(x: T, mean: T, variance: T) -> T:
        return torch.nn.functional.batch_norm(x, mean, variance)

    vector = Tensor("D")
    batch = small(
        "batch", normalised, {"x": PLAIN, "mean": vector, "variance": KEEP_ONE}, {"y": "N D"}
    )
    one = finding(batch, lambda x, m, v: (x - m) / (v + 1e-5).sqrt(), "special values")
    assert one.outcome is PASSED, one
    assert not one.message
    graded = small(
        "graded", normalised, {"x": MATRIX, "mean": vector, "variance": KEEP_ONE}, {"y": "N D"}
    )
    one = finding(graded, lambda x, m, v: (x - m) / (v + 1e-5).sqrt(), "special values")
    assert one.outcome is PASSED, one


KEEP_ONE = Tensor("D", values=Values("ones", lambda shape, _: torch.ones(shape).double()))


@pytest.mark.parametrize("grad", [False, True])
def test_what_the_reference_raises_is_not_wrong_with_the_candidate(grad: bool) -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError("the reference is broken")

    def broken(x: T) -> T:
        if grad:
            doubled: T = Refusing.apply(x)
            return doubled
        raise RuntimeError("the reference is broken")

    op = small("broken", broken, {"x": MATRIX}, {"y": "N D"})
    for name, one in found(op, lambda x: x * 2, "outputs", "gradients", "fresh contents").items():
        if not (grad and name == "outputs"):
            assert one.outcome is BLOCKED, one
    one = finding(op, lambda x: x * 2, "two consumers")
    assert one.outcome is PASSED or "the reference raised an error" in one.message
    check = "gradients" if grad else "outputs"
    one = finding(op, lambda x: x * 2, check)
    assert "the reference raised an error: " in one.message
    assert one.case
    assert finding(op, broken, check).outcome is Outcome.CRASHED  # the candidate's own


def orders(sizes: Any) -> Values:
    def sample(shape: tuple[int, ...], generator: torch.Generator) -> T:
        if shape != (sizes["N"],) or sizes["N"] > 70:
            raise RuntimeError("an order of another length")
        return torch.randperm(sizes["N"], generator=generator)

    return Values("order", sample)


def test_a_distribution_is_asked_for_the_declared_shape_alone() -> None:
    order = Tensor("N", dtype=torch.int64, values=orders)
    inputs = {"x": PLAIN, "order": order}
    put = small(
        "put", lambda x, order: torch.zeros_like(x).index_copy(0, order, x), inputs, {"y": "N D"}
    )
    right = lambda x, order: x[order.argsort()]  # noqa: E731
    one = finding(put, right, "special values")  # an order of equal numbers would be wrong
    assert one.outcome is PASSED, one
    long = small("put", put["eager"].call, inputs, {"y": "N D"}, [Case(N=80, D=2)])
    one = finding(long, right, "outputs")
    assert one.outcome is BLOCKED
    assert "the declared distribution of order raised an error: " in one.message


@pytest.mark.parametrize(
    ("draw", "times", "distinct"),
    [
        (lambda made: torch.randperm(64, generator=made), 64, True),
        (lambda made: torch.randperm(8192, generator=made), 1, True),
        (lambda made: torch.randint(64, (64,), generator=made), 64, False),
        (lambda made: torch.randint(10**6, (64,), generator=made), 64, False),
        (lambda made: torch.randint(10**3, (2,), generator=made), 2048, False),
        (lambda made: torch.randperm(2, generator=made), 2048, True),
    ],
)
def test_values_that_all_differ_by_chance_need_not(draw: Any, times: int, distinct: bool) -> None:
    made = torch.Generator().manual_seed(0)
    assert unusual.distinct([draw(made) for _ in range(times)]) is distinct


# -- roundings ------------------------------------------------------------------------------------


def serial(x: T) -> T:
    total = torch.zeros(x.shape[1], dtype=x.dtype)
    for row in x:
        total = total + row
    return total


def test_roundings_of_equal_terms_add_up() -> None:
    total = small("total", lambda x: x.sum(0), {"x": PLAIN}, {"y": "D"}, [Case(N=500, D=16)])
    one = finding(total, serial, "input layouts")
    assert one.outcome is PASSED, one
    one = finding(total, lambda x: x.sum(0) * (1 + 1e-3 * (not x.stride(0))), "input layouts")
    assert one.outcome is FAILED, one


def test_a_parameter_may_be_rounded_as_a_kernel_receives_it() -> None:
    op = small(
        "decay",
        lambda v, g, b: v * b + g * g * (1 - b),
        {"v": PLAIN, "g": PLAIN},
        {"y": "N D"},
        params={"b": 0.999},
    )

    def rounded(by: float = 1.0) -> Callable[..., T]:
        def call(v: T, g: T, b: float) -> T:
            near = torch.tensor(b, dtype=torch.float32)
            return v * near + g * g * (1 - near) * by

        return call

    one = finding(op, rounded(), "special values")
    assert one.outcome is PASSED, one
    assert finding(op, rounded(1.00002), "special values").outcome is FAILED


def test_a_value_for_which_fits_raises_is_not_tried() -> None:
    op = small(
        "grouped",
        lambda x, groups: x.unflatten(1, (groups, -1)).sum(-1),
        {"x": PLAIN},
        {"y": Tensor("N 2", shape_by=lambda params: f"N {params['groups']}")},
        params={"groups": 2},
        fits=lambda sizes: "D by groups" if sizes["D"] % sizes["groups"] else None,
    )
    one = finding(op, op["eager"].call, "special values")
    assert one.outcome is PASSED, one
    with pytest.raises(ValueError, match="do not fit: ZeroDivisionError: "):
        op(torch.zeros(2, 4), groups=0)


# -- a custom op of torch -------------------------------------------------------------------------


@torch.library.custom_op("accused::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


def of_cubed(ctx: Any, upstream: T) -> T:
    return 3 * ctx.saved_tensors[0] ** 2 * upstream


cubed.register_autograd(
    of_cubed, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def test_a_custom_op_that_has_no_forward_derivative_is_advice() -> None:
    """torch gives none, without an error, and its author can change nothing about it."""
    op = small("cubed", lambda x: x**3, {"x": MATRIX}, {"y": "N D"})
    one = finding(op, cubed, "second derivative")
    assert one.rank is Rank.ADVICE, one
    assert one.message.startswith("y has no forward derivative by x")


def test_a_softmax_of_products_may_be_rounded_otherwise() -> None:
    """Far apart, scores are products of two inputs that are so many times as large."""
    inputs = {"q": Tensor("T D", grad=True), "k": Tensor("S D", grad=True), "v": Tensor("S E")}

    def eager(q: T, k: T, v: T) -> T:
        return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v

    def in_chunks(q: T, k: T, v: T, scale: float = 1.0) -> T:
        highest, total = q.new_full((len(q), 1), -INF), q.new_zeros(len(q), 1)
        found = q.new_zeros(len(q), v.shape[1])
        for keys, values in zip(k.split(4), v.split(4), strict=True):
            scores = q @ keys.T * (scale * q.shape[-1] ** -0.5)
            new = torch.maximum(highest, scores.detach().amax(-1, keepdim=True))
            p, old = (scores - new).exp(), (highest - new).exp()
            total, found = total * old + p.sum(-1, keepdim=True), found * old + p @ values
            highest = new
        return found / total

    cases = [Case(T=6, S=20, D=8, E=4), Case(T=5, S=9, D=5, E=7)]
    op = small("chunks", eager, inputs, {"o": "T E"}, cases)
    one = finding(op, in_chunks, "special values")
    assert one.outcome is PASSED, one
    one = finding(op, lambda q, k, v: in_chunks(q, k, v, 1.001), "special values")
    assert one.outcome is FAILED, one
