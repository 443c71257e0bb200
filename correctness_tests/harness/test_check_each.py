"""A fault of one result of several is found by the checks of successive calls, whichever it is: the
first, the one in the middle or the last."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import FP32, MATRIX, finding, small
from tinyllama.harness import Provider
from tinyllama.harness.correct.checks import Candidate, Rank, accuracy, between, calls, differing

NAMES = ("a", "b", "c")
FACTORS = (2.0, 3.0, 5.0)
T = torch.Tensor
three = small(
    "three",
    lambda a, b, c: tuple(x * f for x, f in zip((a, b, c), FACTORS, strict=True)),
    dict.fromkeys(NAMES, MATRIX),
    dict.fromkeys(("x", "y", "z"), "N D"),
)
total = small("total", lambda a, b, c: a * b * c, dict.fromkeys(NAMES, MATRIX), {"y": "N D"})
of_each = pytest.mark.parametrize("place", range(3))


@of_each
def test_an_output_that_another_call_changes(place: int) -> None:
    kept: list[T] = []

    def call(*given: T) -> tuple[T, ...]:
        outputs = [x * f for x, f in zip(given, FACTORS, strict=True)]
        for one in kept:
            one.add_(1)
        kept[:] = [outputs[place].detach()]
        return tuple(outputs)

    found = finding(three, call, "backward twice")
    assert found.rank is not None
    assert f"changes outputs of the first: {'xyz'[place]}" in found.message


def product(wrong: Callable[..., list[T]]) -> Callable[..., T]:
    """a b c with a backward pass, of whose gradients some are wrong. wrong: is given the saved
    tensors, the upstream gradient and the right gradients."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: T, b: T, c: T) -> T:
            ctx.save_for_backward(a, b, c)
            ctx.strides = a.stride()
            return a * b * c

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            a, b, c = ctx.saved_tensors
            g = upstream[0]
            return tuple(wrong(ctx, g, [g * b * c, g * a * c, g * a * b]))

    return Product.apply


@of_each
def test_a_gradient_that_is_not_in_proportion(place: int) -> None:
    def wrong(ctx: Any, upstream: T, right: list[T]) -> list[T]:
        if upstream.abs().max() > 100:
            right[place] = right[place] * 1.5
        return right

    found = finding(total, product(wrong), "scaled upstream", double_backward=False)
    assert (found.rank, found.message) == (Rank.WRONG, f"not in proportion: {NAMES[place]}")


@of_each
def test_a_gradient_that_depends_on_how_tensors_come_back(place: int) -> None:
    def wrong(ctx: Any, upstream: T, right: list[T]) -> list[T]:
        if ctx.saved_tensors[0].stride() != ctx.strides:
            right[place] = right[place] * 1.5
        return right

    found = finding(total, product(wrong), "backward twice", double_backward=False)
    assert found.rank is Rank.WRONG, found
    assert f"save_on_cpu: grad {NAMES[place]}" in found.message


def test_as_many_other_calls_are_tried_as_may_be_in_flight() -> None:
    candidate = Candidate(total, total["eager"])
    case = candidate.telling()
    args = candidate.inputs(case).args
    for count in (1, 2, len(NAMES)):
        names = list(NAMES[:count])
        given = {name: args[name] for name in names}
        found = {w: len(each) for w, each in calls._other_calls(candidate, case, given)}
        assert found["one of several other calls"] == between.IN_FLIGHT
        assert next(iter(found.items())) == ("another call", 1)
        kept = [what.partition(" with the same ")[2] for what in found]
        parts = [names[0], " and ".join(names[1:])] if count > 1 else []
        assert [one for one in kept if one] == parts


@of_each
@pytest.mark.parametrize("lost", [True, False])
def test_a_nan_that_is_lost_or_spread(place: int, lost: bool) -> None:
    """Each input has one at [1, 2]; a result has none, or one more."""

    def call(*given: T) -> tuple[T, ...]:
        found = [x * f for x, f in zip(given, FACTORS, strict=True)]
        if lost:
            found[place] = found[place].nan_to_num()
        else:
            found[place] = found[place].index_fill(0, torch.tensor([3]), float("nan"))
        return tuple(found)

    for provider, wrong in ((call, True), (three["eager"].call, False)):
        candidate = Candidate(three, Provider("three", "tried", provider, dtypes=FP32))
        inputs = candidate.inputs(case := candidate.smallest())
        for value in inputs.args.values():
            value[1, 2] = float("nan")
        found = differing.wrong_nan(candidate, case, inputs)
        if not wrong:
            assert found is None
            continue
        name = ("x", "y", "z")[place]
        said = "does not reach 1 elements" if lost else "reaches 8 elements"
        at = [1, 2] if lost else [3, 0]
        assert found is not None
        assert found.startswith(f"{said} of {name}, the first at {at}")


@pytest.mark.parametrize(("count", "more"), [(1, ""), (2, ", and 1 more"), (5, ", and 4 more")])
def test_of_accesses_out_of_bounds_the_first_is_told_and_how_many_more(
    count: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = [f"beyond {n}" for n in range(count)]
    monkeypatch.setattr(accuracy.GuardedMemory, "broken", lambda self: beyond)
    candidate = Candidate(three, Provider("three", "tried", three["eager"].call, dtypes=FP32))
    finding = next(accuracy.faults(candidate, candidate.smallest()))
    assert (finding.rank, finding.message) == (Rank.UNSAFE, f"beyond 0{more}")
