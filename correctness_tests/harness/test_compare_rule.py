"""Every number of a comparison, by the rule of `tinyllama.harness.correct.compare` written once
more, in numpy and row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tinyllama.harness.correct.compare import SLACK, Check, Comparison, Reference, compare
from tinyllama.harness.declare.specs import Terms

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@dataclass
class Rule:
    """The numbers of a comparison, by its docstring."""

    result: Any
    eager: Any
    oracle: Any
    perturbed: Any
    dtype: torch.dtype
    terms: Any = None  # magnitudes, scaled to the unit of the dtype that holds them
    shared: bool = False
    gain: float | None = None
    slack: float = SLACK

    @property
    def unit(self) -> float:
        return EPS[self.dtype] / math.sqrt(12)

    @property
    def moved(self) -> list[Any]:
        return [one - self.oracle for one in self.perturbed]

    def times(self) -> float:
        if self.gain is not None:
            return self.gain
        usual = rms([norm(one) for one in self.moved])
        return max(1.0, norm(self.eager - self.oracle) / max(usual, self.unit * norm(self.oracle)))

    def bound(self, own: float, typical: float, rows: int, freedom: int) -> float:
        spread = 1 + math.sqrt(2 * math.log(10**4 * rows) / freedom)
        small = SMALLEST[self.dtype] * math.sqrt(self.oracle.size)
        return self.slack * max(own, spread * typical) + small

    def larger(self, oracle: float, terms: float) -> float:
        return oracle if self.terms is None else max(oracle, terms)

    def tensor(self) -> tuple[float, float]:
        of_terms = 0.0 if self.terms is None else norm(self.terms)
        typical = max(
            self.times() * rms([norm(one) for one in self.moved]),
            self.unit * self.larger(norm(self.oracle), of_terms),
        )
        own = norm(self.eager - self.oracle)
        bound = self.bound(own, typical, 1, self.oracle.size)
        if self.terms is not None and self.shared:
            bound = max(bound, self.bound(own, self.unit * of_terms, 1, 1))
        if self.oracle.ndim > 1 and self.oracle.size == self.oracle.shape[-1]:
            bound = self.rows()[0][1]  # a single row has one bound
        return norm(self.result - self.oracle), bound

    def rows(self) -> list[tuple[float, float]]:
        width = self.oracle.shape[-1]
        every = self.oracle.size // width
        found = []
        for row in range(every):
            result, eager, oracle = (
                one.reshape(every, width)[row] for one in (self.result, self.eager, self.oracle)
            )
            moved = [one.reshape(every, width)[row] for one in self.moved]
            terms = 0.0 if self.terms is None else norm(self.terms.reshape(every, width)[row])
            typical = max(
                self.times() * rms([norm(one) for one in moved]),
                self.unit * self.larger(norm(oracle), terms),
            )
            bound = self.bound(norm(eager - oracle), typical, every, 1)
            found.append((norm(result - oracle), bound))
        return found

    def along(self, tensor: Any) -> float:
        return abs(float((tensor * self.oracle).sum())) / norm(self.oracle) ** 2

    def scale(self) -> tuple[float, float]:
        shared = math.sqrt(self.eager.size / len(np.unique(self.eager)))
        of_terms = 0.0 if self.terms is None else norm(self.terms * self.oracle)
        averaged = self.unit * shared * self.larger(norm(self.oracle**2), of_terms)
        typical = max(
            self.times() * rms([self.along(one) for one in self.moved]),
            averaged / norm(self.oracle) ** 2,
        )
        bound = self.bound(self.along(self.eager - self.oracle), typical, 1, 1)
        return self.along(self.result - self.oracle), bound + 4 * 2.0**-23


def norm(values: Any) -> float:
    return math.sqrt(float((np.asarray(values) ** 2).sum()))


def rms(values: list[float]) -> float:
    return math.sqrt(sum(one**2 for one in values) / len(values))


def near(found: float, expected: float) -> bool:
    return found == pytest.approx(expected, rel=1e-5, abs=1e-300)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "three axes": {"shape": (3, 4, 5)},
    "one row": {"shape": (1, 1, 17)},
    "one row, shared terms": {"shape": (1, 17), "terms": 50.0, "shared": True},
    "one axis": {"shape": (17,)},
    "a number": {"shape": ()},
    "eager far off": {"eager": 300.0},
    "eager far off without a gain": {"eager": 300.0, "gain": 1.0},
    "inputs that are exact": {"perturbed": 0.0},
    "perturbed far off": {"perturbed": 40.0},
    "equal elements": {"levels": 4},
    "terms": {"terms": 50.0},
    "small terms": {"terms": 0.01},
    "shared terms": {"terms": 50.0, "shared": True},
    "terms held wider": {"terms": 5000.0, "held": torch.float32},
    "terms held narrower": {"terms": 50.0, "held": torch.bfloat16},
    "a gain": {"gain": 7.0},
    "a slack": {"slack": 1.5},
    "subnormal": {"size": 1e5},  # smallest numbers
}


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_rules(name: str, dtype: torch.dtype) -> None:
    case = {
        "shape": (6, 9), "eager": 1.0, "perturbed": 1.0, "size": 0.0, "levels": 0, "terms": 0.0,
        "shared": False, "held": None, "gain": None, "slack": SLACK, **CASES[name],
    }  # fmt: skip
    random = torch.Generator().manual_seed(len(name))

    def drawn() -> torch.Tensor:
        return torch.randn(case["shape"], dtype=torch.float64, generator=random)

    oracle = drawn() * (case["size"] * SMALLEST[dtype] if case["size"] else 1.0)
    if case["levels"]:
        oracle = (oracle * 2).round() / 2 + 0.25
    eps = EPS[dtype]
    eager = (oracle * (1 + case["eager"] * eps * drawn())).to(dtype)
    if case["levels"]:
        eager = oracle.to(dtype)
    perturbed = [oracle * (1 + case["perturbed"] * eps * drawn()) for _ in range(3)]
    result = (oracle * (1 + 2 * eps * drawn())).to(dtype)
    magnitude = (1 + drawn().abs()) * case["terms"] if case["terms"] else None
    terms = Terms(dtype=case["held"], shared=case["shared"])
    reference = Reference(eager, oracle, perturbed, magnitude, terms=terms)
    found = compare("y", result, reference, gain=case["gain"], slack=case["slack"])

    held = min(1.0, torch.finfo(case["held"]).eps / eps) if case["held"] else 1.0
    own, usual, exact = (np.atleast_1d(one.double().numpy()) for one in (result, eager, oracle))
    rule = Rule(
        own,
        usual,
        exact,
        [np.atleast_1d(one.numpy()) for one in perturbed],
        dtype,
        None if magnitude is None else np.atleast_1d(magnitude.numpy()) * held,
        case["shared"],
        case["gain"],
        case["slack"],
    )
    whole, row, scale = found.checks
    assert [one.norm for one in found.checks] == ["tensor", "row", "scale"]
    rows = rule.rows()
    worst = max(rows, key=lambda one: one[0] / one[1])
    for check, expected in ((whole, rule.tensor()), (row, worst), (scale, rule.scale())):
        assert near(check.error, expected[0]), check.norm
        assert near(check.bound, expected[1]), check.norm
    assert near(found.widest_row, max(bound for _, bound in rows))
    assert near(reference.gain, Rule(own, usual, exact, rule.perturbed, dtype).times())
    assert found.sees_zero == (norm(rule.oracle) > rule.tensor()[1])
    small = rule.tensor()[1] < 0.01 * norm(rule.oracle)
    assert found.sees_scale == (rule.scale()[1] < 0.01 or small)


@pytest.mark.parametrize("size", [0.0, 1e-16, 1e-3])
def test_a_right_result_of_zero_needs_no_share_along_it(size: float) -> None:
    """Zero up to float64's own rounding: terms of 1 cancel."""
    oracle = torch.full((2, 3), size, dtype=torch.float64)
    ones = torch.ones(2, 3, dtype=torch.float64)
    reference = Reference(oracle.float(), oracle, [oracle, oracle], ones)
    found = compare("y", torch.zeros(2, 3), reference)
    norms = ["tensor", "row"] if size < 1e-9 else ["tensor", "row", "scale"]
    assert [one.norm for one in found.checks] == norms
    if size < 1e-9:
        assert (found.sees_zero, found.sees_scale, found.passed) == (True, True, True)
        assert near(found.widest_row, found.checks[1].bound)
    wrong = compare("y", torch.full((2, 3), 1.0), reference)
    assert not any(one.passed for one in wrong.checks)


def test_a_bound_may_be_reached_and_nan_is_beyond_it() -> None:
    assert Check("row", 1.0, 1.0).passed
    assert not Check("row", 1.0 + 1e-15, 1.0).passed
    assert not Check("row", math.nan, 1.0).passed
    assert not Check("row", 0.0, math.nan).passed


def test_a_comparison_tells_each_norm_in_words() -> None:
    checks = Check("tensor", 0.12345, 0.2), Check("row", 3.0, 0.25)
    told = "y: tensor error 0.123 <= 0.2; row error 3 > allowed 0.25"
    found = Comparison("y", checks, True, True, 0.0)
    assert str(found) == told
    assert not found.passed
    assert Comparison("y", checks[:1], True, True, 0.0).passed
    missing = Comparison.missing("y")
    assert str(missing) == "y is missing"
    assert missing.checks == (Check("missing", math.inf, 0.0),)
    assert not missing.passed
    assert (missing.sees_zero, missing.sees_scale, missing.widest_row) == (True, True, 0.0)


@pytest.mark.parametrize(
    ("got", "off_by", "wrong", "off", "allowed"),
    [
        ([5, 6, 7, 0], 0, 0, 0, 3.0),  # as the oracle
        ([5, 6, 8, 0], 0, 0, 0, 3.0),  # as eager
        ([4, 6, 7, 0], 0, 1, 0, 3.0),
        ([4, 6, 7, 0], 1, 0, 1, 3.0),
        ([3, 6, 7, 0], 1, 1, 0, 3.0),
        ([4, 7, 6, 1], 1, 0, 4, 3.0),
        ([7, 8, 9, 2], 2, 0, 4, 3.0),
    ],
)
def test_integers_are_counted(
    got: list[int], off_by: int, wrong: int, off: int, allowed: float
) -> None:
    oracle, eager = torch.tensor([5, 6, 7, 0]), torch.tensor([5, 6, 8, 0])
    reference = Reference(eager, oracle, [oracle, oracle], off_by=off_by)
    found = compare("y", torch.tensor(got), reference)
    assert found.checks == (Check("exact", wrong, 0.0), Check("off by", off, allowed))
    assert (found.sees_zero, found.sees_scale, found.widest_row) == (True, True, 0.0)
    assert compare("y", torch.tensor(got), reference, slack=1.0).checks[1].bound == 1.0
    assert reference.gain == 1.0


def test_each_perturbed_oracle_may_be_right() -> None:
    oracle = torch.tensor([5, 6])
    moved = [torch.tensor([5, 6]), torch.tensor([5, 7]), torch.tensor([4, 6])]
    reference = Reference(oracle, oracle, moved, off_by=1)
    for right in moved:
        found = compare("y", right, reference)
        assert found.checks == (Check("exact", 0, 0.0), Check("off by", 0, 3.0 * 2))
    assert compare("y", torch.tensor([6, 5]), reference).checks[1].error == 2


def test_whether_zeros_would_be_seen_among_integers() -> None:
    def seen(values: list[int], off_by: int) -> bool:
        oracle = torch.tensor(values)
        return compare("y", oracle, Reference(oracle, oracle, [oracle], off_by=off_by)).sees_zero

    assert seen([0, 0], 1)
    assert seen([0, 2], 1)
    assert seen([0, -2], 1)
    assert not seen([0, 1], 1)
