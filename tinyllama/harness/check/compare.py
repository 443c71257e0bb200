"""When a result is right: its error against float64 is a small multiple of eager's own.

With x the result, e eager's in the same dtype, o the oracle in float64 and d its change when inputs
move by a rounding, an error |x - o| is allowed

    slack * max(|e - o|, spread * max(gain * rms |d|, unit * |o|, unit * |m|))

over the tensor; over each row (a wrong tail, a small row beside large ones); and along o, where
roundings average out, so that a factor of 1.01 shows in bfloat16.

gain = max(1, |e - o| / rms |d|) over the tensor, and no less than the median over the results of a
call: how much worse than rounded inputs eager is. spread = 1 + sqrt(2 ln(10^4 R) / k): how far the
worst of R normal vectors with k independent elements lies above their root mean square, with a
chance below 1 in 10^4; k is 1 for a row, whose elements may share one rounded factor, and for a
tensor their number, or that which d shows where an op declares shared terms. unit = eps / sqrt(12)
is the root mean square of a rounding, m the declared magnitude of terms that may cancel. Added are
one subnormal number and, along o, what matrix units truncate in float32.

Single elements are held to a multiple of the largest error that rounding gives, if that is asked
for. Where o or e is not finite, a result is what one of them is, or finite where one of them is.
Integers and booleans are what o, e, or o for moved inputs is; some may be off by ``off_by``.
docs/design.md says what other rules gave.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from tinyllama.harness.declare.specs import Terms

SLACK = 3.0  # 2 gives false alarms on stock attention, whose CPU kernel approximates exp
ACCUMULATION = 4 * torch.finfo(torch.float32).eps
MISSING = "missing"  # in the place of a norm, of a result that is not there


@dataclass(frozen=True)
class Check:
    """One norm of one result: its error, and the largest error allowed."""

    norm: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False when either is NaN

    def __str__(self) -> str:
        if self.norm in COUNTS:
            return f"{self.error:.0f} elements {COUNTS[self.norm]}, {self.bound:.0f} allowed"
        relation = "<=" if self.passed else "> allowed"
        return f"{self.norm} error {self.error:.3g} {relation} {self.bound:.3g}"


# Of integers and booleans, elements are counted.
COUNTS = {"exact": "are wrong", "off by": "are off by no more than off_by"}


CANCELS = (
    "an error of the size of other rows' rounding; if terms of a sum cancel in this row, declare "
    "their magnitude (docs/check.md: Terms that cancel)"
)


def _at(place: int, result: torch.Tensor, oracle: torch.Tensor) -> str:
    """The element of this number, counted along the last axis first, with what it should be."""
    index = [int(number) for number in np.unravel_index(place, oracle.shape)]
    got, expected = result[tuple(index)].item(), oracle[tuple(index)].item()
    return f"at {index}: got {got:.6g}, expected {expected:.6g}"


@dataclass(frozen=True)
class Comparison:
    """A result against the oracle in each norm, and faults that the bounds would have found.

    sees_zero: a result of zeros would fail (or the right result is zero).
    sees_scale: the result scaled by 1.01 would fail (or the right result is zero).
    widest_row: the largest error allowed in any row; the row of ``checks`` is the worst one.
    worst: where a check fails, the element of the largest error in the worst row, in words.
    """

    name: str
    checks: tuple[Check, ...]
    sees_zero: bool
    sees_scale: bool
    widest_row: float
    worst: str = ""

    def without(self, norm: str) -> "Comparison":
        """The comparison without the check in one norm."""
        return replace(self, checks=tuple(check for check in self.checks if check.norm != norm))

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @classmethod
    def missing(cls, name: str) -> "Comparison":
        """Of a result that is not there."""
        return cls(name, (Check(MISSING, math.inf, 0.0),), True, True, 0.0)

    def __str__(self) -> str:
        if self.checks[0].norm == MISSING:
            return f"{self.name} is missing"
        parts = [str(check) for check in self.checks if check.error or check.norm not in COUNTS]
        hint = f" ({CANCELS})" if self.may_cancel else ""
        parts[:0] = [self.worst] if self.worst else []
        return f"{self.name}: {'; '.join(parts) or 'equal'}{hint}"

    @property
    def may_cancel(self) -> bool:
        """Whether only one row is wrong, by less than what the widest row is allowed: so is a right
        row whose terms cancel, of whose size the comparison knows nothing."""
        failed = [check for check in self.checks if not check.passed]
        return [check.norm for check in failed] == ["row"] and failed[0].error <= self.widest_row


class _Norms(NamedTuple):
    """Of a tensor, of each row, and the share along the oracle."""

    total: torch.Tensor
    rows: torch.Tensor
    along: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """What a result is compared with, all of its shape. What follows from these alone is computed
    once, however many results are compared.

    eager: in the dtype under test. oracle: in float64; perturbed: oracles of perturbed inputs.
    magnitude: of the terms of sums that may cancel, in float64. off_by: of integers, as declared.
    terms: how those terms are rounded.
    """

    eager: torch.Tensor
    oracle: torch.Tensor
    perturbed: Sequence[torch.Tensor]
    magnitude: torch.Tensor | None = None
    off_by: int = 0
    terms: Terms = field(default_factory=Terms)

    @cached_property
    def infinite(self) -> torch.Tensor | None:
        """Where the oracle or eager's result is not finite; None where there is no such element."""
        finite = (
            torch.atleast_1d(result.double().isfinite()) for result in (self.eager, self.oracle)
        )
        infinite = ~torch.stack([*finite]).all(0)
        return infinite if infinite.any() else None

    @cached_property
    def beyond(self) -> torch.Tensor:
        """Eager's result and the oracle where one of them is not finite: (2 M)."""
        results = (torch.atleast_1d(result.double()) for result in (self.eager, self.oracle))
        return torch.stack([result[self.infinite] for result in results])

    @cached_property
    def may_be_finite(self) -> bool:
        """Whether a result may be finite everywhere: each element of eager or of the oracle is."""
        return self.infinite is None or bool(self.beyond.isfinite().any(0).all())

    def of_finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float64, with zeros where it is not compared by norms; a number counts as a vector of
        one element."""
        wide = torch.atleast_1d(tensor.double())
        return wide if self.infinite is None else wide.masked_fill(self.infinite, 0.0)

    def apart(self, result: torch.Tensor) -> torch.Tensor:
        """The result minus the oracle; infinite where a result may not be what it is."""
        difference = self.of_finite(result) - self.exact
        if self.infinite is not None:
            element = torch.atleast_1d(result.double())[self.infinite]
            same = (self.beyond == element) | (self.beyond.isnan() & element.isnan())
            allowed = same | (self.beyond.isfinite() & element.isfinite())
            difference[self.infinite] = torch.where(allowed.any(0), 0.0, math.inf).to(difference)
        return difference

    @cached_property
    def exact(self) -> torch.Tensor:
        """The oracle, where it is finite."""
        return self.of_finite(self.oracle)

    @cached_property
    def error(self) -> _Norms:
        return self.norms_of(self.of_finite(self.eager) - self.exact)

    @cached_property
    def moved(self) -> _Norms:
        """Root mean squares over the changes of the oracle; zeros if no inputs were moved."""
        changes = self.changes() if self.perturbed else [torch.zeros_like(self.exact)]
        norms = zip(*map(self.norms_of, changes), strict=True)
        return _Norms(*(_rms(torch.stack(samples)) for samples in norms))

    def changes(self) -> Iterator[torch.Tensor]:
        """Of the oracle, by inputs that were perturbed; one at a time, since each may take GiB."""
        for moved in self.perturbed:
            change = self.of_finite(moved) - self.exact
            yield torch.where(change.isfinite(), change, 0.0)

    @cached_property
    def freedom(self) -> float:
        """How many independent elements a tensor's changes have. For n changes of k such elements,
        (sum of l)^2 / sum of l^2 is about n k / (n + k), with l the eigenvalues of their products.
        """
        count, draws = self.exact.numel(), len(self.perturbed)
        if not self.terms.shared or draws < 2:
            return count
        changes = torch.stack([change.flatten() for change in self.changes()])
        products = changes @ changes.T
        ratio = (products.trace() ** 2 / products.square().sum()).item()  # NaN without any change
        return min(count, draws * ratio / (draws - ratio)) if ratio < draws else count

    @cached_property
    def largest(self) -> torch.Tensor:
        """The largest error of an element that rounding gives, by one unit of the dtype or more."""
        errors = [self.of_finite(self.eager) - self.exact, *self.changes()]
        terms = [self.exact, *([] if self.magnitude is None else [self.of_finite(self.magnitude)])]
        unit = torch.finfo(self.eager.dtype).eps
        tensors = [*errors, *(unit * tensor for tensor in terms)]
        return torch.stack([tensor.abs().max() for tensor in tensors]).max()

    @cached_property
    def sizes(self) -> list[_Norms]:
        """Of the oracle and of the terms, with what independent roundings of them are along it."""
        tensors = [self.exact] if self.magnitude is None else [self.exact, self.magnitude]
        return [
            _Norms(
                tensor.norm(),
                tensor.norm(dim=-1).flatten(),
                (tensor * self.exact).norm() / self.exact.norm() ** 2,
            )
            for tensor in map(self.of_finite, tensors)
        ]

    @cached_property
    def alike(self) -> float:
        """How many elements have the same value, on average."""
        return self.eager.numel() / torch.unique(self.eager.double()).numel()

    @cached_property
    def gain(self) -> float:
        """How many times worse than rounding the inputs eager's error is; at least 1, and finite:
        the ratio may overflow where the oracle is zero."""
        if not self.eager.is_floating_point():
            return 1.0
        unit = torch.finfo(self.eager.dtype).eps / math.sqrt(12) * self.sizes[0].total
        least = torch.maximum(self.moved.total, unit).clamp_min(1e-300)
        return max(1.0, min(1e300, (self.error.total / least).item()))

    def norms_of(self, tensor: torch.Tensor) -> _Norms:
        """Of a tensor like the oracle."""
        along = (self.of_finite(tensor) * self.exact).sum().abs() / self.sizes[0].total ** 2
        return _Norms(tensor.norm(), tensor.norm(dim=-1).flatten(), along)


def compare(
    name: str,
    result: torch.Tensor,
    reference: Reference,
    *,
    gain: float | None = None,
    slack: float = SLACK,
    of_elements: float | None = None,
) -> Comparison:
    """Compare the error of a result with eager's; see the module for the rule.

    gain: by default that of the reference; larger where other results of the same call ask for it.
    of_elements: the multiple that an element's error is held to; None: it is not.
    """
    eager, oracle = reference.eager, reference.oracle
    assert result.shape == oracle.shape == eager.shape, (result.shape, eager.shape, oracle.shape)
    if not eager.is_floating_point():
        return _compare_integers(name, result, reference, slack)
    limits = torch.finfo(result.dtype)
    unit = limits.eps / math.sqrt(12)
    gain = reference.gain if gain is None else gain
    exact, of_eager, moved = reference.exact, reference.error, reference.moved
    difference = reference.apart(result)
    error = reference.norms_of(difference)
    size, *terms = reference.sizes
    terms_dtype = reference.terms.dtype
    of_terms = unit * (
        1.0 if terms_dtype is None else min(1.0, torch.finfo(terms_dtype).eps / limits.eps)
    )
    # Roundings of the oracle, or of the terms where these are larger.
    rounded = _Norms(*(unit * norms for norms in size))
    for norms in terms:
        rounded = _Norms(*(map(torch.maximum, rounded, (of_terms * norm for norm in norms))))
    subnormal = limits.tiny * limits.eps * math.sqrt(exact.numel())

    def allowed(
        eager_error: torch.Tensor, typical: torch.Tensor, rows: int, freedom: float
    ) -> torch.Tensor:
        spread = 1 + math.sqrt(2 * math.log(1e4 * rows) / freedom)
        return slack * torch.maximum(eager_error, spread * typical) + subnormal

    typical = torch.maximum(gain * moved.total, rounded.total)
    bound = allowed(of_eager.total, typical, 1, reference.freedom)
    if reference.terms.shared:
        for norms in terms:
            bound = torch.maximum(bound, allowed(of_eager.total, of_terms * norms.total, 1, 1))
    typical = torch.maximum(gain * moved.rows, rounded.rows)
    bounds = allowed(of_eager.rows, typical, exact.numel() // exact.shape[-1], 1)
    if exact.dim() > 1 and len(bounds) == 1:
        bound = torch.maximum(bound, bounds[0])
    tensor = Check("tensor", error.total.item(), bound.item())
    worst = (error.rows / bounds).nan_to_num(nan=math.inf).argmax()
    row = Check("row", error.rows[worst].item(), bounds[worst].item())
    widest = bounds.max().item()
    more: tuple[Check, ...] = ()
    if of_elements is not None:
        largest = of_elements * reference.largest.item() + subnormal
        more = (Check("element", difference.abs().max().item(), largest),)

    def element(*checks: Check) -> str:
        """The worst one, where a check failed."""
        if all(check.passed for check in checks):
            return ""
        width = exact.shape[-1]
        place = difference.reshape(-1, width)[worst].abs().argmax()
        return _at(int(worst * width + place), result, oracle)

    if size.total <= 1e-6 * bound:  # zero up to float64's own rounding: zeros are right
        checks = tensor, row, *more
        return Comparison(name, checks, True, True, widest, element(*checks))

    # Independent roundings of the elements average out along the oracle; equal ones are one.
    averaged = math.sqrt(reference.alike) * rounded.along
    typical = torch.maximum(gain * moved.along, averaged)
    tilt = allowed(of_eager.along, typical, 1, 1) + ACCUMULATION
    checks = tensor, row, Check("scale", error.along.item(), tilt.item()), *more
    return Comparison(
        name,
        checks,
        sees_zero=bool(size.total > bound) or not reference.may_be_finite,
        sees_scale=bool(tilt < 0.01 or bound < 0.01 * size.total),
        widest_row=widest,
        worst=element(*checks),
    )


def _compare_integers(
    name: str, result: torch.Tensor, reference: Reference, slack: float
) -> Comparison:
    """In counts of elements: those that are never right, and those off by what is allowed."""
    values = [tensor.long() for tensor in (reference.oracle, reference.eager, *reference.perturbed)]
    oracle, got = values[0], result.long()
    decided = torch.stack([got == tensor for tensor in values]).any(0)
    undecided = torch.stack([oracle != tensor for tensor in values]).any(0).sum().item()
    off = ~decided & ((got - oracle).abs() <= reference.off_by)
    wrong = (~decided & ~off).sum().item()
    checks = Check("exact", wrong, 0.0), Check("off by", off.sum().item(), slack * undecided)
    sees_zero = bool((oracle.abs() > reference.off_by).any()) or not oracle.any()
    comparison = Comparison(name, checks, sees_zero, True, 0.0)
    if comparison.passed:
        return comparison
    place = int(torch.where(decided, 0, (got - oracle).abs()).argmax())
    return replace(comparison, worst=_at(place, result, reference.oracle))


def apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The difference in float64; 0 where both are the same infinity, or both a NaN."""
    x, y = x.double(), y.double()
    return torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether every element is equal; NaN equals NaN."""
    if x.shape != y.shape:
        return False
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def near(x: torch.Tensor, y: torch.Tensor, share: float, most: float = 0.0) -> bool:
    """Whether the norm of the difference is at most this share of the other one's, of which what is
    finite counts, or at most ``most``. An infinity, or a NaN, must be in both."""
    return apart(x, y).norm().item() <= max(share * norm_of_finite(y), most)


def norm_of_finite(tensor: torch.Tensor) -> float:
    return tensor.double().nan_to_num(0.0, 0.0, 0.0).norm().item()


def _rms(samples: torch.Tensor) -> torch.Tensor:
    """The root mean square over the first axis."""
    return samples.pow(2).mean(0).sqrt()
