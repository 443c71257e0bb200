"""Results of a candidate, held to the base's reference in float64.

They are in two processes, so random projections are compared (sums over the elements with random
signs): each is of the size of the tensor's norm.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tinyllama.harness.measure.right_results import Compared, WrongResultError

PROJECTIONS = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24  # elements at a time
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplicative hashing, Knuth 6.4


@dataclass(frozen=True)
class Proof:
    """Numbers that stand for a result, which its own side found right.

    strides: of the result, reference_strides: of the reference's. dense: whether the result is
    contiguous. projections: of the result, exact: of the reference's in float64; allowed: the
    largest norm of the difference of these two. norm, exact_norm, norms_apart: the same of their
    norms. slack: of the provider, in both that is allowed. inputs: a digest of them, or 0.
    """

    strides: tuple[int, ...]
    reference_strides: tuple[int, ...]
    dense: bool
    projections: tuple[float, ...]
    exact: tuple[float, ...]
    allowed: float
    norm: float
    exact_norm: float
    norms_apart: float
    slack: float = 1.0
    inputs: int = 0


def proofs_of(
    results: Mapping[str, torch.Tensor], compared: Compared, slack: float
) -> dict[str, Proof]:
    """The proofs of right results. slack: of the provider."""
    proofs = {}
    for comparison in compared.comparisons:
        name = comparison.name
        reference = compared.references.of(name)
        bounds = {check.norm: check.bound for check in comparison.checks}
        if "tensor" in bounds:
            allowed, size = bounds["tensor"], float(reference.exact.norm())
            # An error across the exact result changes the norm, too.
            across = allowed**2 / max(2 * size, allowed) if allowed else 0.0
            norms_apart = bounds["scale"] * size + across if "scale" in bounds else allowed
        else:
            others = (reference.eager, *reference.perturbed)
            apart = [float((reference.of_finite(x) - reference.exact).norm()) for x in others]
            off_by = reference.off_by * math.sqrt(reference.exact.numel())
            norms_apart = allowed = math.hypot(*apart) + off_by
        value = reference.of_finite(results[name])
        of_value, of_exact = projections(value, reference.exact)
        proofs[name] = Proof(
            strides=_strides(results[name]),
            reference_strides=_strides(reference.eager),
            dense=results[name].is_contiguous(),
            projections=of_value,
            exact=of_exact,
            allowed=allowed,
            norm=float(value.norm()),
            exact_norm=float(reference.exact.norm()),
            norms_apart=norms_apart,
            slack=slack,
        )
    return proofs


def hold_to_base(
    base: Mapping[str, Proof], candidate: Mapping[str, Proof], *, removed: bool = False
) -> None:
    """Hold a candidate's results to the base's reference, and to the base's strides, which a
    consumer reads them by. Raises WrongResultError, and ValueError for a result that the candidate
    lacks, unless ``removed``, or has of other inputs.

    Allowed is what either side's reference allows, without a slack that the candidate declares: one
    whose result jumps with a rounding allows more. Three times as much is allowed, since the mean
    square of eight projections exceeds nine times the square of the norm once in 5e11 (chi-squared
    of eight degrees above 72: 2e-12).
    """
    for name, expected in base.items():
        proof = candidate.get(name)
        if proof is None and removed:
            continue
        if proof is None or proof.inputs != expected.inputs:
            raise ValueError(f"{name}: the candidate lacks it, or has it of other inputs")
        allowed = max(expected.allowed, proof.allowed / proof.slack)
        norms_apart = max(expected.norms_apart, proof.norms_apart / proof.slack)
        pairs = zip(proof.projections, expected.exact, strict=True)
        error = math.sqrt(statistics.mean((now - then) ** 2 for now, then in pairs))
        apart = abs(proof.norm - expected.exact_norm)
        if not (error <= 3 * allowed < math.inf and apart <= norms_apart):
            raise WrongResultError(
                f"{name}: about {error:.3g} from the base's reference, where {allowed:.3g} is "
                f"allowed; their norms are {apart:.3g} apart, where {norms_apart:.3g} is allowed"
            )
        if not proof.dense and proof.strides not in (expected.strides, expected.reference_strides):
            raise WrongResultError(
                f"{name} has the strides {proof.strides}, the base's {expected.strides}: whoever "
                "reads it next would pay for the copy"
            )


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """0 for dimensions of one element, whose stride means nothing."""
    return tuple(s if n > 1 else 0 for n, s in zip(value.shape, value.stride(), strict=True))


def projections(*tensors: torch.Tensor) -> list[tuple[float, ...]]:
    """Of each of these tensors, which have one shape, `PROJECTIONS` sums over its elements with
    random signs: the same ones in each process for tensors of that shape and device."""
    first = tensors[0]
    sums = torch.zeros(len(tensors), PROJECTIONS, dtype=torch.float64, device=first.device)
    for start in range(0, first.numel(), _PART):
        parts = [t.detach().flatten()[start : start + _PART].double() for t in tensors]
        generator = torch.Generator(first.device).manual_seed(start)
        for row, part in zip(sums, parts, strict=True):
            row -= part.sum()  # a sum with signs is twice that of the positive ones minus this
        plus = torch.empty_like(parts[0])
        for place in range(PROJECTIONS):
            plus.bernoulli_(0.5, generator=generator)  # 1 where the sign is +, 0 where it is -
            for row, part in zip(sums, parts, strict=True):
                row[place] += 2 * torch.dot(part, plus)
    return [tuple(row) for row in sums.tolist()]


def digest(tensors: Sequence[torch.Tensor], *what: object) -> int:
    """A digest of the bits of tensors, of their shapes and dtypes, and of anything else that has a
    stable representation."""
    hasher = hashlib.sha256(repr(what).encode())
    for value in tensors:
        words = value.detach().contiguous().view(_INTEGERS[value.element_size()]).flatten()
        total = torch.zeros((), dtype=torch.int64, device=value.device)
        for start in range(0, words.numel(), _PART):
            part = words[start : start + _PART].to(torch.int64)
            places = torch.arange(start, start + part.numel(), device=part.device)
            # Short float64 numbers differ only in their upper bits.
            mixed = (part ^ (part >> 32)).add_(1)
            total += (mixed * places.mul_(_ODD).bitwise_or_(1)).sum()
        hasher.update(f"{tuple(value.shape)} {value.dtype} {int(total)}".encode())
    return int.from_bytes(hasher.digest()[:8], "little")
