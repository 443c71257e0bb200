"""When a result is right: its error against float64 is a small multiple of eager's own.

With x the result, e eager's at the same dtype, o the oracle in float64, and d the change of
the oracle when its inputs are perturbed by the dtype's rounding, an error |x - o| is allowed

    slack * max(|e - o|, spread * max(gain * rms |d|, unit * |o|, unit * |m|))

in three norms, each of which finds what the others miss:

* per tensor: the overall error, zeros and NaN included;
* per row (last axis): a wrong tail, or a small row beside large ones;
* along the oracle: the share of x - o that points along o. Rounding averages out there, so a
  result scaled by 1.01 shows even at bf16, where a single rounding is nearly as large.

Eager's error in one row is one draw of a random quantity. So d says how sensitive each row is;
``gain`` = max(1, |e - o| / rms |d|) how much worse than rounded inputs eager really is, over the
whole tensor, and no less than the median over the results of the same call; ``spread`` =
1 + sqrt(2 ln(10^4 R) / k) how far the worst of R normal vectors with k independent elements lies
above their root mean square with a chance below 1 in 10^4 (k is 1 for a row, whose elements may
share one rounded factor, and their number for a tensor; 1 where a tensor of several axes is a
single row, since both norms are the same one then); ``unit`` = eps / sqrt(12) is the root
mean square of one rounding, and m the magnitude of the terms of a sum that may cancel, where an
op declares it: with the unit of the dtype in which they are held, and with k = 1 for a tensor too
where all elements may share one rounded factor. Added to that is one subnormal number and, along
the oracle, the bias of matrix units, which truncate the sums they accumulate in float32. No
tolerance is a constant.

Integers and booleans are equal to o, or to what the reference gives in the case's dtype or for
perturbed inputs. Elements of those may be off by as much as declared, but no more than ``slack``
times as many as the reference is undecided about.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class Comparison:
    """A result against the oracle in each norm, and faults that the bounds would have found.

    sees_zero: a result of zeros would fail (or the right result is zero).
    sees_scale: the result scaled by 1.01 would fail (or the right result is zero).
    widest_row: the largest error allowed in any row; the row of ``checks`` is the worst one.
    """

    name: str
    checks: tuple[Check, ...]
    sees_zero: bool
    sees_scale: bool
    widest_row: float

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
        parts = [
            f"{c.norm} error {c.error:.3g} {'<=' if c.passed else '> allowed'} {c.bound:.3g}"
            for c in self.checks
        ]
        return f"{self.name}: {'; '.join(parts)}"


class Reference(NamedTuple):
    """What a result is compared with, all of its shape.

    eager: in the dtype under test. oracle: in float64; perturbed: oracles of perturbed inputs.
    magnitude: of the terms of sums that may cancel, in float64. off_by: of integers, as declared.
    terms: how those terms are rounded.
    """

    eager: torch.Tensor
    oracle: torch.Tensor
    perturbed: Sequence[torch.Tensor]
    magnitude: torch.Tensor | None = None
    off_by: int = 0
    terms: Terms = Terms()

    @property
    def moved(self) -> torch.Tensor:
        """The changes of the oracle, stacked; a number counts as a vector of one element."""
        every = torch.stack([torch.atleast_1d(one.double()) for one in self.perturbed])
        return every - torch.atleast_1d(self.oracle.double())

    @property
    def gain(self) -> float:
        """How many times worse than rounding the inputs eager's error is; at least 1."""
        if not self.eager.is_floating_point():
            return 1.0
        error = (self.eager.double() - self.oracle).norm()
        sensitive = _rms(self.moved.flatten(1).norm(dim=1))
        unit = torch.finfo(self.eager.dtype).eps / math.sqrt(12) * self.oracle.norm()
        return max(1.0, (error / torch.maximum(sensitive, unit).clamp_min(1e-300)).item())


def compare(
    name: str,
    result: torch.Tensor,
    reference: Reference,
    *,
    gain: float | None = None,
    slack: float = SLACK,
) -> Comparison:
    """Compare the error of a result with eager's; see the module for the rule.

    gain: by default that of the reference; larger where other results of the same call ask for it.
    """
    eager, oracle, magnitude = reference.eager, reference.oracle, reference.magnitude
    assert result.shape == oracle.shape == eager.shape, (result.shape, eager.shape, oracle.shape)
    if not eager.is_floating_point():
        return _compare_integers(name, result, reference, slack)
    limits = torch.finfo(result.dtype)
    unit = limits.eps / math.sqrt(12)
    gain = reference.gain if gain is None else gain
    exact = torch.atleast_1d(oracle.double())
    error, of_eager = (torch.atleast_1d(tensor.double()) - exact for tensor in (result, eager))
    moved = reference.moved
    terms = None if magnitude is None else torch.atleast_1d(magnitude)
    held = reference.terms.dtype
    if terms is not None and held is not None:
        terms = terms * min(1.0, torch.finfo(held).eps / limits.eps)
    subnormal = limits.tiny * limits.eps * math.sqrt(exact.numel())

    def allowed(own: torch.Tensor, typical: torch.Tensor, rows: int, freedom: int) -> torch.Tensor:
        spread = 1 + math.sqrt(2 * math.log(1e4 * rows) / freedom)
        return slack * torch.maximum(own, spread * typical) + subnormal

    def larger(norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The larger norm: that of the oracle or that of the terms."""
        return norm(exact) if terms is None else torch.maximum(norm(exact), norm(terms))

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.norm(dim=-1).flatten()

    size = exact.norm()
    usual = torch.maximum(
        gain * _rms(moved.flatten(1).norm(dim=1)), unit * larger(torch.Tensor.norm)
    )
    bound = allowed(of_eager.norm(), usual, 1, exact.numel())
    if terms is not None and reference.terms.shared:
        bound = torch.maximum(bound, allowed(of_eager.norm(), unit * terms.norm(), 1, 1))
    width = exact.shape[-1]
    usual = torch.maximum(gain * _rms(moved.norm(dim=-1)).flatten(), unit * larger(rows))
    bounds = allowed(rows(of_eager), usual, exact.numel() // width, 1)
    errors = rows(error)
    if exact.dim() > 1 and len(errors) == 1:
        bound = torch.maximum(bound, bounds[0])
    whole = Check("tensor", error.norm().item(), bound.item())
    worst = (errors / bounds).nan_to_num(nan=math.inf).argmax()
    row = Check("row", errors[worst].item(), bounds[worst].item())
    widest = bounds.max().item()

    if size <= 1e-6 * bound:  # zero up to float64's own rounding: zeros are right
        return Comparison(name, (whole, row), True, True, widest)

    def along(tensors: torch.Tensor) -> torch.Tensor:
        return (tensors * exact).flatten(1).sum(1).abs() / size**2

    # Independent roundings of the elements average out along the oracle; equal ones are one.
    shared = math.sqrt(eager.numel() / torch.unique(eager).numel())
    averaged = unit * shared * (larger(lambda one: (one * exact).norm()) / size**2)
    usual = torch.maximum(gain * _rms(along(moved)), averaged)
    tilts = along(torch.stack([error, of_eager]))
    tilt = allowed(tilts[1], usual, 1, 1) + ACCUMULATION
    return Comparison(
        name,
        (whole, row, Check("scale", tilts[0].item(), tilt.item())),
        sees_zero=bool(size > bound),
        sees_scale=bool(tilt < 0.01 or bound < 0.01 * size),
        widest_row=widest,
    )


def _compare_integers(
    name: str, result: torch.Tensor, reference: Reference, slack: float
) -> Comparison:
    """In counts of elements: those that are never right, and those off by what is allowed."""
    values = [one.long() for one in (reference.oracle, reference.eager, *reference.perturbed)]
    oracle, got = values[0], result.long()
    known = torch.stack([got == one for one in values]).any(0)
    undecided = torch.stack([oracle != one for one in values]).any(0).sum().item()
    off = ~known & ((got - oracle).abs() <= reference.off_by)
    wrong = (~known & ~off).sum().item()
    checks = Check("exact", wrong, 0.0), Check("off by", off.sum().item(), slack * undecided)
    sees_zero = bool((oracle.abs() > reference.off_by).any()) or not oracle.any()
    return Comparison(name, checks, sees_zero, True, 0.0)


def _rms(samples: torch.Tensor) -> torch.Tensor:
    """The root mean square over the first axis."""
    return samples.pow(2).mean(0).sqrt()
