"""Results that were held to float64, as later calls and other processes are held to them."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tinyllama.harness.gate.digests import digest, digests_of_calls, projections
from tinyllama.harness.measure.op_contender import WrongResultError

SLACK = 4.0  # times eager's own error; the suite's rule, which costs ten more runs, allows less


@dataclass(frozen=True)
class Proof:
    """A verified result: a digest of its bits, random projections, and its allowed error. exact:
    the projections of what the reference gives in float64."""

    digest: int
    projections: tuple[float, ...]
    allowed: float
    exact: tuple[float, ...] = ()


def held_to_base(
    base: Sequence[Mapping[str, Proof]], candidate: Sequence[Mapping[str, Proof]]
) -> list[dict[str, Proof]]:
    """The candidate's proofs, held to what the base's reference gives, with the error that the base
    allows where it is the smaller. Raises WrongResultError.

    Of a difference only projections on random signs are known: each is of the size of its norm, and
    the mean square of eight exceeds nine times its square once in 1e14.
    """
    found = []
    for seed, (wanted, given) in enumerate(zip(base, candidate, strict=True)):
        for name, proof in wanted.items():
            if name not in given:
                raise WrongResultError(f"the base's reference gives {name}, the candidate does not")
            pairs = zip(given[name].projections, proof.exact, strict=True)
            error = math.sqrt(statistics.mean((now - then) ** 2 for now, then in pairs))
            if not error <= 3 * proof.allowed < math.inf:
                raise WrongResultError(
                    f"{name} of seed {seed}: about {error:.3g} from the base's reference, which "
                    f"allows {proof.allowed:.3g}"
                )
        found.append(
            {
                name: replace(proof, allowed=min(proof.allowed, wanted[name].allowed))
                for name, proof in given.items()
                if name in wanted
            }
        )
    return found


def proven(value: torch.Tensor, plain: torch.Tensor, oracle: torch.Tensor, slack: float) -> Proof:
    """A result held to what the reference gives in float64, with a multiple of the error that it
    makes in the result's own dtype (``plain``).

    Raises ValueError with what is wrong.
    """
    if (value.shape, value.dtype) != (plain.shape, plain.dtype):
        raise ValueError(f" is {tuple(value.shape)} {value.dtype}, unlike eager's")
    allowed = 0.0
    for over, where in ((_widest_row, " in a row"), (_whole, "")):
        eps = torch.finfo(plain.dtype).eps if plain.dtype.is_floating_point else 0.0
        rounding = eps * over(oracle)
        allowed = SLACK * slack * max(over(plain.double() - oracle), rounding)
        error = over(value.double() - oracle)
        if not error <= allowed < math.inf:
            raise ValueError(f": error {error:.3g}{where} > {allowed:.3g}")
    return Proof(digest(value), projections(value), allowed, projections(oracle))


def as_proven(value: torch.Tensor, proof: Proof, *, bits: bool) -> bool:
    """Whether a result is what was verified: bit for bit, or within the allowed error."""
    if bits:
        return digest(value) == proof.digest
    # Two right results differ by at most twice the allowed error.
    return _are_near(projections(value), proof.projections, 2 * proof.allowed)


@dataclass(frozen=True)
class Note:
    """What a timed call gave: a digest of all its bits, or projections of each result."""

    digest: int | None
    projections: Mapping[str, tuple[float, ...]]

    @staticmethod
    def of(results: Mapping[str, torch.Tensor], *, bits: bool) -> Note:
        return Note.of_calls([results], bits=bits)[0]

    @staticmethod
    def of_calls(calls: Sequence[Mapping[str, torch.Tensor]], *, bits: bool) -> list[Note]:
        """Of the results of several calls; the host waits for the device only once."""
        if not bits:
            each = ({name: projections(value) for name, value in one.items()} for one in calls)
            return [Note(None, found) for found in each]
        digests = digests_of_calls([list(one.values()) for one in calls])
        return [Note(_named(one, of), {}) for one, of in zip(calls, digests, strict=True)]

    def is_of(self, results: Mapping[str, torch.Tensor], limits: Mapping[str, float]) -> bool:
        """Whether these are the noted results: bit for bit, or within the limits."""
        if self.digest is not None:
            return self == Note.of(results, bits=True)
        return results.keys() == self.projections.keys() and all(
            _are_near(projections(value), self.projections[name], limits[name])
            for name, value in results.items()
        )


def _named(results: Mapping[str, torch.Tensor], digest: int) -> int:
    """A digest of results, of their names, shapes and dtypes too."""
    text = repr([(name, value.shape, value.dtype) for name, value in results.items()])
    whole = hashlib.sha256(f"{text} {digest}".encode()).digest()
    return int.from_bytes(whole[:8], "little")


def near(value: torch.Tensor, plain: torch.Tensor, limit: float) -> None:
    """Raise ValueError, with what is wrong, if a result is further than ``limit`` from eager's."""
    if (value.shape, value.dtype) != (plain.shape, plain.dtype):
        raise ValueError(f" is {tuple(value.shape)} {value.dtype}, unlike eager's")
    if not (error := _whole(value.double() - plain.double())) <= limit:
        raise ValueError(f": {error:.3g} from what eager gives, allowed {limit:.3g}")


def _are_near(now: Sequence[float], then: Sequence[float], limit: float) -> bool:
    """Whether projections may be those of two results that are at most ``limit`` apart. A
    projection of their difference is about as large as its norm, and exceeds eight times that once
    in 1e15."""
    return all(abs(a - b) <= 8 * limit for a, b in zip(now, then, strict=True))


def _whole(value: torch.Tensor) -> float:
    return float(value.norm())


def _widest_row(value: torch.Tensor) -> float:
    return float(torch.atleast_1d(value).norm(dim=-1).max())
