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

from tinyllama.harness.check.cases import PERTURBATIONS
from tinyllama.harness.check.compare import Reference, compare
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.declare.op import Op
from tinyllama.harness.measure.op_contender import WrongResultError

SLACK = 4.0  # times eager's own error; `check` allows less, and needs ten more runs for that
LEAST_FACTOR = 1e-3  # a factor that differs from 1 by less is not looked for: norms show it
PROJECTIONS = 8
FEW = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24  # elements at a time
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplicative hashing, Knuth 6.4


@dataclass(frozen=True)
class Proof:
    """A result that is right by its own side's reference.

    strides: of its dimensions; reference_strides: of what the reference gives. dense: whether it
    is contiguous. projections: of the result; exact: those of the reference in float64. allowed:
    how far these may be apart, as a norm. norm, exact_norm, norms_apart: the same of the norms of
    the result and the reference. inputs: a digest of the inputs; 0 where none was made.
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
    inputs: int = 0


def references(op: Op, inputs: Inputs) -> dict[str, Reference]:
    """What each result for these inputs is compared with. Integers, and results of a few elements,
    in which the reference may be right by chance, also with those of inputs that are moved by a
    rounding."""
    eager = op["eager"].call
    usual, exact = evaluate(op, eager, inputs), evaluate(op, eager, inputs.double())
    sampled = [name for name, x in exact.items() if not x.is_floating_point() or x.numel() <= FEW]
    moved: dict[str, list[torch.Tensor]] = {name: [] for name in exact}
    for draw in range(PERTURBATIONS if sampled else 0):
        results = evaluate(op, eager, inputs.perturbed(draw), watched=False)
        for name in sampled:
            moved[name].append(results[name])
    off_by = {name: output.off_by for name, output in op.outputs.items()}
    return {
        name: Reference(usual[name], oracle, moved[name], off_by=off_by.get(name, 0))
        for name, oracle in exact.items()
    }


def prove(
    results: Mapping[str, torch.Tensor],
    references: Mapping[str, Reference],
    slack: float,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Proof]:
    """Hold results to what the reference gives in float64: the error of each tensor and of its
    worst row may be a multiple of that which the reference has in their dtype. So may that of the
    norm of the whole, in which the roundings of its rows (along its longest dimension, in which
    they may be common) average out and a factor does not: one of 1.01 shows in bfloat16. Elements
    that are not finite, and integers, are compared as `check` does.

    slack: how many times as much a provider may err. dtypes: of results, where they are not as the
    reference's. Raises WrongResultError.
    """
    proofs = {}
    for name, reference in references.items():
        if name not in results:
            raise WrongResultError(f"no {name}")
        value, expected = results[name], reference.eager
        right = value.dtype in (expected.dtype, dtypes.get(name))
        if value.shape != expected.shape or not right:
            shape = f"{tuple(value.shape)} {value.dtype}"
            raise WrongResultError(f"{name} is {shape}, unlike the reference's")
        if not expected.is_floating_point():
            comparison = compare(name, value, reference, slack=SLACK * slack)
            if not comparison.passed:
                raise WrongResultError(str(comparison))
            proofs[name] = proof_of(value, reference, 0.0, 0.0)
            continue
        eps = torch.finfo(expected.dtype).eps
        finite, exact = reference.of_finite(expected), reference.exact
        usual_errors = [_norms(finite - exact), *map(_norms, reference.changes())]
        errors = zip(
            _norms(reference.apart(value)),
            map(max, zip(*usual_errors, strict=True)),
            _norms(exact),
            (" in a row", ""),
            strict=True,
        )
        for error, usual, size, where in errors:
            noise = max(usual, eps * size) * slack
            allowed = noise * SLACK
            if not error <= allowed < math.inf:
                raise WrongResultError(f"{name}: error {error:.3g} > {allowed:.3g}{where}")
        averaged = allowed * math.sqrt(max(exact.shape) / exact.numel())
        apart = SLACK * abs(float(finite.norm()) - size)
        least = max(eps, LEAST_FACTOR) * size
        across = allowed and allowed**2 / max(2 * size, allowed)  # of errors at right angles to it
        norms_apart = max(averaged, slack * max(apart, least)) + across
        proofs[name] = proof_of(value, reference, allowed, norms_apart)
        _hold_norm(name, proofs[name], proofs[name])
    return proofs


def proof_of(
    value: torch.Tensor, reference: Reference, allowed: float, norms_apart: float
) -> Proof:
    finite, exact = reference.of_finite(value), reference.exact
    of_value, of_exact = projections(finite, exact)
    rounded = reference.off_by * math.sqrt(exact.numel())
    if not value.is_floating_point():  # those that inputs moved by a rounding may change as well
        others = (reference.eager, *reference.perturbed)
        rounded += math.hypot(
            *(float((reference.of_finite(other) - exact).norm()) for other in others)
        )
    return Proof(
        _strides(value),
        _strides(reference.eager),
        value.is_contiguous(),
        of_value,
        of_exact,
        allowed + rounded,
        float(finite.norm()),
        float(exact.norm()),
        norms_apart + rounded,
    )


def _hold_norm(name: str, proof: Proof, expected: Proof) -> None:
    if not abs(proof.norm - expected.exact_norm) <= expected.norms_apart:
        raise WrongResultError(
            f"{name}: its norm is {proof.norm:.5g}, not {expected.exact_norm:.5g} as in float64, "
            f"and may be {expected.norms_apart:.2g} apart: a common factor"
        )


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
        _hold_norm(name, proof, expected)
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
    rows = value.norm(dim=-1)
    return float(rows.max()), float(rows.norm())


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
