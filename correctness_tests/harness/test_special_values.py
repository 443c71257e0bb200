"""Values that random ones never are; sizes of one and of whole blocks; outputs that are inputs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, run, sizes

T = torch.Tensor
highest = Op(
    "highest",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    cases=[Case(N=5, D=8), Case(N=3, D=50, why="ragged")],
    dtypes=(torch.float32,),
)
highest.reference(lambda x: x.amax(-1))
highest.independent("sorted")(lambda x: x.sort(-1).values[:, -1])
highest.provider("torch")(lambda x: x.max(-1).values)


def found(op: Op, call: Callable[..., Any], check: str) -> Finding:
    (one,) = run(Candidate(op, Provider(op.name, "tried", call, op.dtypes)), only=[check])
    return one


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
    return x.nan_to_num(nan=float("-inf")).amax(-1)


@pytest.mark.parametrize("call", [lambda x: x.amax(-1), lambda x: x.max(-1).values])
def test_each_convention_of_known_code_is_right(call: Callable[..., Any]) -> None:
    one = found(highest, call, "special values")
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
    plain = run(
        Candidate(highest, Provider(highest.name, "tried", call, highest.dtypes)),
        only=["outputs", "gradients", "extreme values", "input layouts"],
    )
    assert all(one.outcome.good for one in plain)
    one = found(highest, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, rank), one
    assert seen in one.message


logsumexp = Op(
    "logsumexp",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    cases=[Case(N=5, D=8), Case(N=3, D=50, why="ragged")],
    dtypes=(torch.float32,),
)
logsumexp.reference(lambda x: x.logsumexp(-1))


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
        one = found(op, shifted, "special values")
        assert (one.outcome, one.message) == (Outcome.PASSED, "")


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (nan_of_minus_infinity, "-inf in x: a NaN reaches 1 elements of y, the first at [2]"),
        (nan_beside_infinity, "inf in x: a NaN reaches 4 elements of y, the first at [0]"),
    ],
)
def test_a_nan_beside_it_is_found(call: Callable[..., Any], seen: str) -> None:
    one = found(logsumexp, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert one.message == seen


weights = Op(
    "weights",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=50), Case(N=1, D=64, why="one row")],
    dtypes=(torch.float32,),
)
weights.reference(lambda x: x.softmax(-1))


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

    one = found(weights, call, "special values")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert "x far apart: y: " in one.message


def test_an_input_with_a_domain_is_left_alone() -> None:
    from tinyllama.ops import OPS

    adamw = OPS["adamw"]
    (one,) = run(Candidate(adamw, adamw["eager"]), only=["special values"])
    assert (one.outcome, one.message) == (Outcome.UNSUPPORTED, "no input may have any value")


def no_full_last_block(x: T) -> T:
    """The last block of 64 is left out where it is full."""
    y = x.amax(-1)
    return y if x.shape[1] % 64 or x.shape[1] == 64 else x[:, :-64].amin(-1)


def one_row(x: T) -> T:
    return x.amax(-1) if len(x) > 1 else x.amin(-1)


@pytest.mark.parametrize(
    ("call", "case"), [(no_full_last_block, "D1024"), (one_row, "N1D8")], ids=["block", "row"]
)
def test_whole_blocks_and_single_entries_are_sizes(
    call: Callable[..., Any], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "SIZES", sizes.SIZES[:5])
    assert found(highest, call, "outputs").outcome is Outcome.PASSED
    one = found(highest, call, "sizes")
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert case in one.case


scaled = Op(
    "scaled",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"factor": 2.0},
    cases=[Case(N=5, D=8), Case(N=4, D=12, params={"factor": 1.0})],
    dtypes=(torch.float32,),
)
scaled.reference(lambda x, factor: x * factor)


def test_an_output_that_is_an_input_is_found_in_any_case() -> None:
    one = found(scaled, lambda x, factor: x if factor == 1 else x * factor, "fresh contents")
    assert one.outcome is Outcome.FAILED
    assert one.message == "y shares memory with x: a change of one changes both"
    assert "N4D12" in one.case
    assert found(scaled, lambda x, factor: factor * x, "fresh contents").outcome is Outcome.PASSED


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
    one = found(grouped, call, "fresh contents")
    assert one.outcome is outcome, one


def test_inference_mode_is_tried() -> None:
    def call(x: T, factor: float) -> T:
        return factor * x if not torch.is_inference_mode_enabled() else x + factor

    one = found(scaled, call, "fresh contents")
    assert one.outcome is Outcome.FAILED
    assert one.message.startswith("call 4, on new contents: y: ")


def test_a_view_is_right_where_the_reference_gives_one() -> None:
    turned = Op("turned", inputs={"x": Tensor("N D")}, outputs={"y": "D N"}, cases=[Case(N=5, D=8)])
    turned.reference(lambda x: x.T)
    one = found(turned, lambda x: x.T, "fresh contents")
    assert "shares memory" not in one.message
