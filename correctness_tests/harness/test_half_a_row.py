"""Half of a row is -inf, as after masking."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import MATRIX, found, small, with_backward
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Rank, blocks, resizing, special

T = torch.Tensor
total = small("total", lambda x: x.logsumexp(-1), {"x": MATRIX}, {"y": "N"})
of_a_vector = small(
    "of_a_vector", lambda x: x.logsumexp(-1), {"x": Tensor("D", grad=True)}, {"y": ""}, [Case(D=8)]
)
unit = small("unit", lambda x: x / x.square().mean(-1, keepdim=True), {"x": MATRIX}, {"y": "N D"})
nothing = small(
    "nothing", lambda x: (x.logsumexp(-1), 0 * x.amax(-1)), {"x": MATRIX}, {"y": "N", "z": "N"}
)


def first_rows_added(x: T) -> T:
    return torch.cat([x[:3].sum(-1), x[3:].logsumexp(-1)])


first_added = small(
    "first_added",
    lambda x: (x.logsumexp(-1), first_rows_added(x)),
    {"x": MATRIX},
    {"y": "N", "z": "N"},
)


def masked(x: T) -> T:
    """Rows of which more than a block is -inf."""
    return x[..., :100].isinf().all(-1)


def half_a_row(op: Op, call: Callable[..., Any], **traits: Any) -> tuple[Any, str]:
    """The sizes for which something is wrong, not only advised against, and what; none, and
    nothing."""
    provider = Provider(op.name, "tried", call, (torch.float32,), **traits)
    candidate = Candidate(op, provider)
    seen = blocks.half_a_row(candidate, resizing.general(candidate), "x")
    if seen is None:
        return {}, ""
    assert len(seen) == 2, "advice has a third part"
    return seen[0].case.dims, seen[1]


@pytest.mark.parametrize(
    ("op", "call", "said"),
    [
        (of_a_vector, lambda x: x.logsumexp(-1) * (1 + masked(x)), "y is not the reference's"),
        (total, lambda x: x.logsumexp(-1) * (1 + masked(x).any()), "y is not the reference's"),
        (
            total,
            with_backward(
                lambda x: x.logsumexp(-1),
                lambda g, x: g[:, None] * x.softmax(-1) * (1 + masked(x)[:, None]),
            ),
            "grad x is not the reference's",
        ),
        (
            total,
            with_backward(
                lambda x: x.logsumexp(-1),
                lambda g, x: (g[:, None] * x.softmax(-1)).where(~masked(x)[:, None], math.nan),
            ),
            "a NaN reaches 2051 elements of grad x",
        ),
        (
            first_added,
            lambda x: (x.logsumexp(-1).where(~masked(x) | (torch.arange(len(x)) < 3), math.nan),
                       first_rows_added(x)),
            "a NaN reaches 1 elements of y, the first at [3]",
        ),
    ],
    ids=["of a vector", "of all", "in backward", "a NaN in backward", "in a row of finite outputs"],
)  # fmt: skip
def test_what_half_a_row_of_minus_infinity_shows(
    op: Op, call: Callable[..., Any], said: str
) -> None:
    dims, text = half_a_row(op, call)
    assert dims.get("D") == 2051
    assert text.startswith(f"half a row of -inf in x: {said}")


@pytest.mark.parametrize(
    "op", [total, of_a_vector, unit, nothing, first_added], ids=lambda op: op.name
)
def test_half_a_row_of_minus_infinity_may_give_what_the_reference_gives(op: Op) -> None:
    assert half_a_row(op, op["eager"].call) == ({}, "")


def attended(q: T, k: T, v: T) -> T:
    """The first two keys are left out."""
    return (q @ k[2:].T).softmax(-1) @ v[2:]


attention = small(
    "attention",
    attended,
    {name: Tensor(shape, grad=True) for name, shape in (("q", "N K"), ("k", "S K"), ("v", "S D"))},
    {"y": "N D"},
    [Case(N=3, S=5, K=4, D=8)],
)


def of_left_out(q: T, k: T, v: T) -> tuple[T, T]:
    """Probabilities, 0 of a key that is left out; and the output, which reads no such key."""
    left_out = torch.arange(len(k)) < 2
    return (q @ k.T).masked_fill(left_out, -math.inf).softmax(-1), attended(q, k, v)


def by_probabilities(g: T, q: T, k: T, v: T) -> tuple[T, T, T]:
    """As in FlashAttention."""
    p, y = of_left_out(q, k, v)
    ds = p * (g @ v.T - (g * y).sum(-1, keepdim=True))
    return ds @ k, ds.T @ q, p.T @ g


def by_all_values(q: T, k: T, v: T) -> T:
    return of_left_out(q, k, v)[0] @ v


@pytest.mark.parametrize(
    ("call", "rank", "said"),
    [
        (with_backward(attended, by_probabilities), Rank.ADVICE, "elements of grad q"),
        (by_all_values, None, "elements of y"),
        (
            with_backward(lambda *of: attended(*of) * (1 + masked(of[2]).any()), by_probabilities),
            None,
            "y is not the reference's",
        ),
        (with_backward(attended, lambda g, q, k, v: (q, k, v)), None, "grad q is not"),
    ],
    ids=["in gradients alone", "in outputs", "another output", "gradients that differ"],
)
def test_an_infinity_that_no_output_depends_on_may_make_gradients_a_nan(
    call: Callable[..., Any], rank: Rank | None, said: str
) -> None:
    """The reference never reads the row; other right code multiplies it by 0."""
    provider = Provider("attention", "tried", call, (torch.float32,))
    candidate = Candidate(attention, provider)
    _, text, *ranks = blocks.half_a_row(candidate, resizing.general(candidate), "v") or ("", "")
    assert text.startswith("half a row of -inf in v: ")
    assert said in text
    assert ranks == [rank] * (rank is not None)


def test_advice_on_half_a_row_of_one_input_hides_no_fault_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {"x": (Rank.ADVICE,), "y": ()}
    half: Any = lambda _, case, name: (case, f"half of {name}", *seen[name])  # noqa: E731
    monkeypatch.setattr(special, "half_a_row", half)
    both = small("both", lambda x, y: x + y, {"x": MATRIX, "y": MATRIX}, {"z": "N D"})
    one = found(both, both["eager"].call, "special values")["special values"]
    assert (one.rank, one.message) == (Rank.WRONG, "half of y")


def test_a_shorter_row_is_halved_where_none_of_2051_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(x: T) -> T:
        return x.logsumexp(-1) * (1 + masked(x))

    few = {"supports": lambda dims: "too long" if dims["D"] > 2000 else None}
    found_there = [half_a_row(total, call, **few)]
    monkeypatch.setattr(blocks, "MOST_ELEMENTS", 5 * 259)
    found_there.append(half_a_row(total, call))
    assert [dims for dims, _ in found_there] == [{"N": 5, "D": 259}] * 2
