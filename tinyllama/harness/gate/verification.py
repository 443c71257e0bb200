"""Results of a provider, held to the reference in float64: in the process that computed them, and
by another side's reference.

Of tensors that are in two processes, random projections are compared (sums over the elements with
random signs): each is of the size of the tensor's norm.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tinyllama.harness.measure.op_contender import WrongResultError

SLACK = 4.0  # times eager's own error; `check` allows less, and needs ten more runs for that
LEAST_FACTOR = 1e-3  # a factor that differs from 1 by less is not looked for: norms show it
PROJECTIONS = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24  # elements at a time
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplicative hashing, Knuth 6.4

Results = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Proof:
    """A result that is right by its own side's reference.

    strides: of its dimensions; reference_strides: of what the reference gives. dense: whether it
    is contiguous. projections: of the result; exact: those of the reference in float64. allowed:
    how far these may be apart, as a norm. inputs: a digest of the inputs; 0 where none was made.
    """

    strides: tuple[int, ...]
    reference_strides: tuple[int, ...]
    dense: bool
    projections: tuple[float, ...]
    exact: tuple[float, ...]
    allowed: float
    inputs: int = 0


def prove(results: Results, reference: Results, exact: Results, slack: float) -> dict[str, Proof]:
    """Hold results to what the reference gives in float64 (``exact``): the error of each tensor and
    of its worst row may be a multiple of the reference's own in that dtype (``reference``). So may
    the error along the exact result, where roundings of its rows (of its longest dimension, in
    which they may be common) average out and a wrong factor does not: 1.01 shows in bfloat16.

    slack: how many times as much a provider may err. Raises WrongResultError.
    """
    proofs = {}
    for name, oracle in exact.items():
        if name not in results:
            raise WrongResultError(f"no {name}")
        value, expected = results[name], reference[name]
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            shape = f"{tuple(value.shape)} {value.dtype}"
            raise WrongResultError(f"{name} is {shape}, unlike the reference's")
        eps = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
        off, usual_off = value.double() - oracle, expected.double() - oracle
        norms = zip(_norms(off), _norms(usual_off), _norms(oracle), strict=True)
        for (error, usual, size), where in zip(norms, (" in a row", ""), strict=True):
            noise = max(usual, eps * size) * slack
            allowed = noise * SLACK
            if not error <= allowed < math.inf:
                raise WrongResultError(f"{name}: error {error:.3g} > {allowed:.3g}{where}")
        factor, usual = _along(off, oracle), _along(usual_off, oracle) * slack
        longest = max(oracle.shape, default=1)
        averaged = noise * math.sqrt(longest / max(oracle.numel(), 1))
        most = max(SLACK * usual, SLACK * averaged, max(eps, LEAST_FACTOR) * size * slack)
        if not factor <= most:
            raise WrongResultError(
                f"{name}: a common factor makes an error of {factor:.3g} > {most:.3g}"
            )
        proofs[name] = proof_of(value, expected, oracle, allowed)
    return proofs


def proof_of(
    value: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, allowed: float
) -> Proof:
    of_value, of_exact = projections(value, exact)
    strides = _strides(value), _strides(reference)
    return Proof(*strides, value.is_contiguous(), of_value, of_exact, allowed)


def hold_to_base(
    base: Mapping[str, Proof], candidate: Mapping[str, Proof], *, removed: bool = False
) -> None:
    """Hold a candidate's results to the base's reference, with the error that it allows, and to the
    base's strides, which a consumer reads them by. Raises WrongResultError, and ValueError for a
    result that the candidate lacks, unless ``removed``, or has of other inputs.

    The mean square of eight projections exceeds nine times the square of the norm once in 5e11
    (chi-squared of eight degrees above 72: 2e-12).
    """
    for name, expected in base.items():
        proof = candidate.get(name)
        if proof is None and removed:
            continue
        if proof is None or proof.inputs != expected.inputs:
            raise ValueError(f"{name}: the candidate lacks it, or has it of other inputs")
        pairs = zip(proof.projections, expected.exact, strict=True)
        error = math.sqrt(statistics.mean((now - then) ** 2 for now, then in pairs))
        if not error <= 3 * expected.allowed < math.inf:
            raise WrongResultError(
                f"{name}: about {error:.3g} from the base's reference, which allows "
                f"{expected.allowed:.3g}"
            )
        if not proof.dense and proof.strides not in (expected.strides, expected.reference_strides):
            raise WrongResultError(
                f"{name} has the strides {proof.strides}, the base's {expected.strides}: whoever "
                "reads it next would pay for the copy"
            )


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """0 for dimensions of one element, whose stride means nothing."""
    return tuple(s if n > 1 else 0 for n, s in zip(value.shape, value.stride(), strict=True))


def _norms(value: torch.Tensor) -> tuple[float, float]:
    """The norm of the widest row of a tensor in float64, and that of the whole tensor."""
    rows = torch.atleast_1d(value.double()).norm(dim=-1)
    return float(rows.max()), float(rows.norm())


def _along(error: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the part of an error that is a multiple of the exact result."""
    size = float(exact.norm())
    return abs(float((error * exact).sum())) / size if size else 0.0


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
