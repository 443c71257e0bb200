"""Values that random ones never are; sizes of one and of whole blocks; outputs that are inputs."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import MATRIX, finding, found, small
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import (
    Candidate,
    Outcome,
    Rank,
    differing,
    run,
    settings,
    sizes,
    special,
)
from tinyllama.harness.declare.values import integers, uniform

T = torch.Tensor
cases = [Case(N=5, D=8), Case(N=3, D=50, why="ragged")]
highest = small("highest", lambda x: x.amax(-1), {"x": MATRIX}, {"y": "N"}, cases)
highest.independent("sorted")(lambda x: x.sort(-1).values[:, -1])
highest.provider("torch")(lambda x: x.max(-1).values)


class EachTie(torch.autograd.Function):
    """Each of the largest elements gets all of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        y = x.amax(-1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return torch.where(x == y[:, None], grads[0][:, None], 0.0)


def zero_beside_a_block(x: T) -> T:
    """What does not fill a block of 8 is filled with zeros."""
    y = x.amax(-1)
    return y.clamp_min(0) if x.shape[1] % 8 else y


def zero_for_equal(x: T) -> T:
    y = x.amax(-1)
    return torch.where((x == x[:, :1]).all(-1), y + 1, y)


def nan_everywhere(x: T) -> T:
    finite = x.detach().nan_to_num(nan=float("nan"), posinf=0.0, neginf=0.0)
    return x.amax(-1) + 0 * finite.sum()


def nan_of_infinity(x: T) -> T:
    return x.amax(-1) + 0 * x.detach().sum()


def nan_lost(x: T) -> T:
    return torch.where(x.isnan(), float("-inf"), x).amax(-1)


@pytest.mark.parametrize("call", [lambda x: x.amax(-1), lambda x: x.max(-1).values])
def test_each_convention_of_known_code_is_right(call: Callable[..., Any]) -> None:
    one = finding(highest, call, "special values")
    assert (one.outcome, one.message) == (Outcome.PASSED, "")


@pytest.mark.parametrize(
    ("call", "rank", "seen"),
    [
        (zero_beside_a_block, Rank.WRONG, "x all negative: y: "),
        (zero_for_equal, Rank.WRONG, "x all zero: y: "),
        (EachTie.apply, Rank.ADVICE, "the gradient is not the reference's: grad x: "),
        (nan_lost, Rank.ADVICE, "a NaN in x does not reach 1 elements of y, the first at [2]"),
        (nan_of_infinity, Rank.WRONG, "inf in x: a NaN reaches 5 elements of y"),
        (nan_everywhere, Rank.ADVICE, "a NaN in x reaches 4 elements of y, the first at [0]"),
    ],
)
def test_what_random_values_do_not_show_is_found(
    call: Callable[..., Any], rank: Rank, seen: str
) -> None:
    plain = found(highest, call, "outputs", "gradients", "extreme values", "input layouts")
    assert all(one.outcome.good for one in plain.values())
    one = finding(highest, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, rank), one
    assert seen in one.message


logsumexp = small("logsumexp", lambda x: x.logsumexp(-1), {"x": MATRIX}, {"y": "N"}, cases)


def shifted(x: T) -> T:
    """The shift by the largest element, as online softmax does: a NaN for a row with infinity."""
    largest = x.detach().amax(-1, keepdim=True)
    return (x - largest).exp().sum(-1).log() + largest[:, 0]


def nan_of_minus_infinity(x: T) -> T:
    return shifted(x) + 0 * x.detach().amin(-1)


def nan_beside_infinity(x: T) -> T:
    return shifted(x) + 0 * x.detach().sum()


def test_an_infinite_output_without_a_gradient_may_be_a_nan() -> None:
    infinite = torch.tensor([[0.0, float("inf")]], requires_grad=True)
    logsumexp["eager"].call(infinite).sum().backward()
    assert infinite.grad is not None
    assert infinite.grad.isnan().any()
    assert shifted(infinite).isnan().all()
    of_outputs = copy.copy(logsumexp)
    of_outputs.inputs = {"x": Tensor("N D")}
    for op in (logsumexp, of_outputs):  # also where no gradient of a candidate is asked
        one = finding(op, shifted, "special values")
        assert (one.outcome, one.message) == (Outcome.PASSED, "")


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (nan_of_minus_infinity, "-inf in x: a NaN reaches 1 elements of y, the first at [2]"),
        (nan_beside_infinity, "inf in x: a NaN reaches 4 elements of y, the first at [0]"),
    ],
)
def test_a_nan_beside_it_is_found(call: Callable[..., Any], seen: str) -> None:
    one = finding(logsumexp, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert one.message == seen


of_rows = [Case(N=5, D=50), Case(N=1, D=64, why="one row")]


def from_a_finite_maximum(x: T) -> T:
    largest = x.detach().amax(-1, keepdim=True).clamp_min(-1e4)
    return (x - largest).exp().sum(-1).log() + largest[:, 0]


def test_values_beyond_a_number_that_was_to_be_infinite_are_tried() -> None:
    one = finding(logsumexp, from_a_finite_maximum, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert one.message.startswith("x shifted far down: y: ")


def centred(x: T) -> T:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)


def centred_by_a_narrow_sum(x: T) -> T:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    return (x.float() - mean.float()).to(x.dtype)


def test_a_sum_that_overflows_in_float16_is_found() -> None:
    both = (torch.float32, torch.float16)
    wide = [Case(N=5, D=8), Case(N=3, D=200, why="a sum beyond 65,504")]
    op = small("centre", centred, {"x": MATRIX}, {"y": "N D"}, wide)
    op.dtypes = both
    one = finding(op, centred, "special values", dtypes=both)
    assert one.outcome is Outcome.PASSED, one
    one = finding(op, centred_by_a_narrow_sum, "special values", dtypes=both)
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert "fp16" in one.case


def moved(x: T, offset: int) -> T:
    if offset < 0:
        raise ValueError(f"offset {offset}: use 0 or more")
    return torch.nn.functional.pad(x, (offset, 0))[:, : x.shape[1]]


def by_one(x: T, offset: int) -> T:
    return moved(x, min(offset, 1))


def by_one_alone(x: T, offset: int) -> T:
    if offset != 1:
        raise ValueError(f"offset {offset}: use 1")
    return moved(x, offset)


shift = small("shift", moved, {"x": MATRIX}, {"y": "N D"}, cases, params={"offset": 1})


@pytest.mark.parametrize(
    ("call", "seen"), [(moved, ""), (by_one, "offset = 2: y: "), (by_one_alone, "")]
)
def test_whole_numbers_have_other_values_where_they_are_taken(call: Any, seen: str) -> None:
    one = finding(shift, call, "special values")
    assert one.outcome is (Outcome.FAILED if seen else Outcome.PASSED), one
    assert one.message.startswith(seen)


@pytest.mark.parametrize(
    ("value", "taken", "other"),
    [
        (1.0, lambda p: p <= 1, 0.5),
        (1.0, lambda p: p >= 1, 3.0),
        (2.0**-10, lambda p: True, 1e3 * 2.0**-10),  # of less nothing is seen
        (2.0**-20, lambda p: True, 1e6 * 2.0**-20),
        (0.0, lambda p: True, 0.5),
        (6, lambda p: True, 7),
        (6, lambda p: p <= 6, 5),
        (6, lambda p: p % 2 == 0, 8),
        (False, lambda p: True, True),
        (6, lambda p: p == 6, None),
    ],
)
def test_a_parameter_is_given_the_first_other_value_that_is_taken_and_seen(
    value: Any, taken: Callable[[Any], bool], other: Any
) -> None:
    def call(x: T, p: Any) -> T:
        if not taken(p):
            raise ValueError(f"p {p}: use another")
        return x + p

    op = small("plus", call, {"x": MATRIX}, {"y": "N D"}, params={"p": value})
    candidate = Candidate(op, op["eager"])
    (case,) = candidate.plain()
    assert list(settings.settings(candidate, case)) == ([] if other is None else [("p", other)])


@pytest.mark.parametrize("place", range(3))
def test_a_parameter_that_one_of_several_results_depends_on_is_seen(place: int) -> None:
    def call(x: T, p: float) -> tuple[T, ...]:
        return tuple(x + (p if number == place else 0) for number in range(3))

    outputs = {name: "N D" for name in ("first", "middle", "last")}
    op = small("several", call, {"x": Tensor("N D")}, outputs, params={"p": 1.0})
    candidate = Candidate(op, op["eager"])
    (case,) = candidate.plain()
    assert [name for name, _ in settings.settings(candidate, case)] == ["p"]


SCALE = {"x": MATRIX, "by": Tensor("N", dtype=torch.int64, values=lambda dims: integers(6))}
scale = small("scale", lambda x, by: x * by[:, None], SCALE, {"y": "N D"}, cases)


@pytest.mark.parametrize("value", [0, 5])
def test_an_input_of_integers_has_each_of_its_ends_everywhere(value: int) -> None:
    def call(x: T, by: T) -> T:
        return x * by[:, None] + float((by == value).all())

    one = finding(scale, call, "special values")
    assert one.outcome is Outcome.FAILED, one
    assert one.message.startswith(f"by all {value}: y: ")


weights = small("weights", lambda x: x.softmax(-1), {"x": MATRIX}, {"y": "N D"}, of_rows)


def by_logsumexp(x: T) -> T:
    return (x - x.logsumexp(-1, keepdim=True)).exp()


@pytest.mark.parametrize("draw", [0, 2, 5])
def test_a_difference_of_large_numbers_may_be_rounded(draw: int) -> None:
    """As kernels that save the logsumexp do: off by half a unit in the last place of 200."""
    provider = Provider(weights.name, "tried", by_logsumexp, weights.dtypes)
    candidate = Candidate(weights, provider, torch.device("cpu"), draw)
    (one,) = run(candidate, only=["special values"])
    assert (one.outcome, one.message) == (Outcome.PASSED, "")


def test_large_numbers_excuse_no_more_than_a_rounding() -> None:
    def call(x: T) -> T:
        return by_logsumexp(x) * torch.where(x > 100, 1.001, 1.0)

    one = finding(weights, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert "x far apart: y: " in one.message


def test_what_is_not_large_excuses_nothing() -> None:
    """Tiny inputs have tiny results, which are not held to the size of the usual ones."""
    doubled = small("doubled", lambda x: 2 * x, {"x": MATRIX}, {"y": "N D"})

    def call(x: T) -> T:
        return torch.where((x.abs() > 0) & (x.abs() < 1e-7), x, 2 * x)

    one = finding(doubled, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert one.message.startswith("x tiny: y: ")


@pytest.mark.parametrize(
    ("bits", "others", "lost"), [(18, (), True), (18, (1,), True), (10, (1,), False)]
)
def test_a_reference_that_lost_its_digits_is_told_by_any_result(
    bits: int, others: tuple[int, ...], lost: bool
) -> None:
    """One adds 2^bits and subtracts it again: of 24 bits, about 6 or 14 are left of 1."""
    outputs = {f"y{bit}": "N D" for bit in (*others, bits)}
    op = small(
        "lost",
        lambda x: tuple((x + 2.0**bit) - 2.0**bit for bit in (*others, bits)),
        {"x": Tensor("N D")},
        outputs,
    )
    candidate = Candidate(op, op["eager"])
    (case,) = candidate.plain()
    assert differing.cancels(case, candidate.inputs(case)) is lost


def test_an_input_with_a_domain_is_left_alone() -> None:
    """Of such an op only parameters are changed; what has none of both is not asked."""
    domain = {"x": Tensor("N D", values=uniform(1.0, 2.0))}
    root = small("root", lambda x: (x - 1).sqrt(), domain, {"y": "N D"})
    one = finding(root, root["eager"].call, "special values")
    assert one.outcome is Outcome.UNSUPPORTED
    assert one.message == "no input may have any value, and no parameter another one"
    scaled = small(
        "scaled", lambda x, by: by * (x - 1).sqrt(), domain, {"y": "N D"}, params={"by": 2.0}
    )
    assert finding(scaled, scaled["eager"].call, "special values").outcome is Outcome.PASSED
    one = finding(scaled, lambda x, by: 2 * (x - 1).sqrt(), "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG)
    assert one.message.startswith("by = 1.0: y")


def no_full_last_block(x: T) -> T:
    """The last block of 256 is left out where it is full."""
    y = x.amax(-1)
    return y if x.shape[1] % 256 or x.shape[1] == 256 else x[:, :-256].amin(-1)


def one_row(x: T) -> T:
    return x.amax(-1) if len(x) > 1 else x.amin(-1)


@pytest.mark.parametrize(
    ("call", "case"), [(no_full_last_block, "D768"), (one_row, "N1D8")], ids=["block", "row"]
)
def test_whole_blocks_and_single_entries_are_sizes(
    call: Callable[..., Any], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "SIZES", sizes.SIZES[:12])  # to 1,024
    assert finding(highest, call, "outputs").outcome is Outcome.PASSED
    one = finding(highest, call, "sizes")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert case in one.case


cases = [Case(N=5, D=8), Case(N=4, D=12, params={"factor": 1.0})]
scaled = small(
    "scaled",
    lambda x, factor: x * factor,
    {"x": MATRIX},
    {"y": "N D"},
    cases,
    params={"factor": 2.0},
)


def test_an_output_that_is_an_input_is_found_in_any_case() -> None:
    one = finding(scaled, lambda x, factor: x if factor == 1 else x * factor, "fresh contents")
    assert one.outcome is Outcome.FAILED
    assert one.message == "y shares memory with x: a change of one changes both"
    assert "N4D12" in one.case
    assert finding(scaled, lambda x, factor: factor * x, "fresh contents").outcome is Outcome.PASSED


grouped = Op(
    "grouped",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"groups": 2},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)
grouped.reference(lambda x, groups: x.unflatten(1, (groups, -1)).softmax(-1).flatten(1))


def of_more_rows(x: T, groups: int) -> T:
    if len(x) < 2:
        raise ValueError("use 2 rows or more")
    return grouped["eager"].call(x, groups)


def one_row_kept(x: T, groups: int) -> T:
    return x if len(x) < 2 else grouped["eager"].call(x, groups)


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda x, groups: grouped["eager"].call(x, groups), Outcome.PASSED),
        (of_more_rows, Outcome.PASSED),
        (one_row_kept, Outcome.FAILED),
    ],
    ids=["an axis of which the op takes no single entry", "one row is refused", "one row is kept"],
)
def test_memory_is_asked_about_of_single_entries_that_are_taken(
    call: Callable[..., Any], outcome: Outcome
) -> None:
    one = finding(grouped, call, "fresh contents")
    assert one.outcome is outcome, one


def test_inference_mode_is_tried() -> None:
    def call(x: T, factor: float) -> T:
        return factor * x if not torch.is_inference_mode_enabled() else x + factor

    one = finding(scaled, call, "fresh contents")
    assert one.outcome is Outcome.FAILED
    assert one.message.startswith("call 4, on new contents: y: ")


def test_a_view_is_right_where_the_reference_gives_one() -> None:
    turned = small("turned", lambda x: x.T, {"x": Tensor("N D")}, {"y": "D N"})
    one = finding(turned, lambda x: x.T, "fresh contents")
    assert "shares memory" not in one.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_special_values_are(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.125, -0.25, 0.0, 0.375, 1.0, 3.0], dtype=dtype)
    found = {kind: change(x) for kind, change in special.KINDS.items()}
    assert all(one.dtype is dtype for one in found.values())
    lists = {kind: one.tolist() for kind, one in found.items()}
    tiny, tiniest, huge = (lists.pop(kind) for kind in ("tiny", "tiniest", "huge"))
    assert lists == {
        "all negative": [-2.625, -0.75, -0.5, -0.875, -1.5, -3.5],
        "all zero": [0.0] * 6,
        "with ties": [-2.0, 0.0, 0.0, 0.5, 1.0, 3.0],
        "far apart": [64 * value for value in x.tolist()],
        "shifted": (x + 1000).tolist(),
        "shifted far down": (x - 32768).tolist(),
        "shifted far up": (x + 32768).tolist(),
    }
    assert huge == (x * 2**33).tolist()
    smallest = {torch.float16: 2.0**-14}.get(dtype, 2.0**-126)  # of normal numbers
    for found_there, power in ((tiny, 0.25), (tiniest, 0.5)):
        expected = [value * smallest**power for value in x.tolist()]
        assert found_there == pytest.approx(expected, rel=2**-7)
    for place, infinite in enumerate(special.INFINITIES):
        changed = special.having(x, infinite)
        assert changed.tolist() == [*x.tolist()[:3], (math.inf, -math.inf)[place], *x.tolist()[4:]]
    assert x[3] == 0.375, "it is a copy"


# -- half a row of -inf ----------------------------------------------------------------------------
