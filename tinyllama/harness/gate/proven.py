"""A provider of an op on one case, whose results are compared with right ones: before it is timed,
and in its timed calls.

On the inputs of two known seeds its results must be, bit for bit, those of a call that was compared
with float64. A provider that is not deterministic must be within the allowed error.

Each timed call has input values that nobody has seen: those of a known seed, with each feature
(along the last dimension) multiplied by a number near 1. These numbers come from a seed that the
judge draws when it asks for a turn. So both sides get the same values, making them costs as much as
a copy, and they are written to the addresses of the turn before. To draw all values anew would take
5 to 25 times as long as a turn on a CPU, and would leave colder caches. Integers and single numbers
keep their values.

The results of each call are noted as a digest of their bits. When the turns are over, the judge
compares the notes of both sides, and chooses which calls are compared with eager's results, and
which with float64's (`Proven.hold`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from tinyllama.harness.check.compare import apart, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs, copied, evaluate
from tinyllama.harness.gate.digests import digest
from tinyllama.harness.gate.verified import Note, Proof, as_proven, near, proven
from tinyllama.harness.measure.op_contender import OpContender, Timed, WrongResultError

SEEDS = 2  # known ones
PLACES = 16  # seeds of values for a turn; each call has one
SINGLE = PLACES - 1  # the place of the inputs of a call on the device's clock
FACTORS, WIDTH = 1024, 0.125  # how many numbers near 1; from 1 - WIDTH/2 to 1 + WIDTH/2


@dataclass
class _Expected:
    """For one seed: the results that a call must give, and the allowed distance from them."""

    results: dict[str, torch.Tensor]
    allowed: dict[str, float] = field(default_factory=dict)


class Proven(OpContender):
    """A provider on one case, whose results are compared with right ones."""

    def __init__(self, timed: Timed, device: str, package: str, files: Sequence[str]) -> None:
        super().__init__(timed, device, package, files)
        self.expected: dict[int, _Expected] = {}
        self.masters: dict[tuple[int, str], Inputs] = {}  # by known seed and layout
        self.places: dict[int, Inputs] = {}  # of timed calls: filled anew for each turn
        self.place = SINGLE  # of the timed call that is prepared
        self.values: int | None = None  # of a turn: the first seed of its calls
        self.noted: dict[int, Note] = {}  # by seed of values, what timed calls gave
        self.exact = self.device.type in self.case.provider.deterministic

    def verify(self) -> list[dict[str, Proof]]:
        """Compare the results of each seed with float64, and check that a call leaves its inputs
        unchanged. Returns the proofs with which later calls are compared.

        Raises WrongResultError.
        """
        self.round, provider = 0, self.case.provider
        try:
            evaluate(self.op, provider.call, self._drawn(), provider.overwrites)
        except AssertionError as error:
            raise WrongResultError(f"{self.case}: {error}") from error
        return [self._verified(seed) for seed in range(SEEDS)]

    def _verified(self, seed: int) -> dict[str, Proof]:
        self.round = seed
        inputs, eager = self._drawn(), self.op["eager"].call
        exact = evaluate(self.op, eager, inputs.double())
        plain = evaluate(self.op, eager, inputs)
        got = self._one_call(seed)
        slack = self.case.provider.slack_in(self.case.dtype)
        proofs = {}
        for name, oracle in exact.items():
            if name not in got:
                raise WrongResultError(f"{self.case}: no {name}")
            try:
                proofs[name] = proven(got[name], plain[name], oracle, slack)
            except ValueError as error:
                raise WrongResultError(f"{self.case}: {name}{error}") from error
        return proofs

    def expect(self, proofs: list[dict[str, Proof]]) -> None:
        """Compare one call of each seed with what was verified, and keep its results.

        Raises WrongResultError.
        """
        self.expected = {}
        for seed, wanted in enumerate(proofs):
            got = self._one_call(seed)
            for name, proof in wanted.items():
                if name not in got or not as_proven(got[name], proof, bits=self.exact):
                    how = "its bits are not" if self.exact else "it is not near"
                    raise WrongResultError(f"{self.case}: {name}: {how} what was verified")
            kept = {name: value.detach().clone() for name, value in got.items()}
            self.expected[seed] = _Expected(kept, {n: 2 * p.allowed for n, p in wanted.items()})

    def notes(self, seed: int) -> list[int]:
        """For each call of a turn a digest of its results; none if the provider is not
        deterministic."""
        if not self.exact:
            return []
        notes = (self.noted[one].digest for one in self._calls_of(seed))
        return [one for one in notes if one is not None]

    def hold(self, seed: int, call: int, exact: bool) -> None:
        """Compare a call of an earlier turn with eager's results on its values, or (exact) with
        float64's. The call is made again, and must give the results that it gave in the turn: the
        same bits if its provider is deterministic. call: any number; modulo the number of calls in
        a turn.

        Raises WrongResultError.
        """
        calls = self._calls_of(seed)
        of, eager = calls[call % len(calls)], self.op["eager"].call
        what, note = f"{self.case}: a timed call", self.noted[of]
        with self._values_of(seed, of % PLACES):
            self._give(self.passes[-1])
            self._run()
            got = {name: value.detach() for name, value in self._collected().items()}
            if not note.is_of(got, {} if self.exact else self._limits()):
                raise WrongResultError(
                    f"{what} gave other results than the same call made again: they are wrong, or "
                    "its provider is not deterministic"
                )
            inputs = self._varied(_copies(self._master()))
        plain = evaluate(self.op, eager, inputs)
        oracle = evaluate(self.op, eager, inputs.double()) if exact else plain
        slack = self.case.provider.slack_in(self.case.dtype)
        limits = {} if exact else self._limits(plain)
        for name, wanted in plain.items():
            if name not in got:
                raise WrongResultError(f"{what} gave no {name}")
            try:
                if exact:
                    proven(got[name], wanted, oracle[name], slack)
                else:
                    near(got[name], wanted, limits[name])
            except ValueError as error:
                raise WrongResultError(f"{what}: {name}{error}") from error

    def _calls_of(self, seed: int) -> list[int]:
        """The seeds of values of a turn's calls."""
        found = sorted(one for one in self.noted if one // PLACES == seed + 1)
        if not found:
            raise ValueError(f"{self.case}: no turn had the seed {seed}")
        return found

    def _limits(self, plain: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """How far two right results may differ: as far as on the known inputs, and further in
        proportion where the results are larger."""
        known = self.expected[0]
        sizes = {name: norm_of_finite(value) for name, value in known.results.items()}
        found = {}
        for name, allowed in known.allowed.items():
            size = norm_of_finite(plain[name]) if plain else sizes[name]
            found[name] = allowed * max(1.0, size / sizes[name] if sizes[name] else 1.0)
        return found

    # -- inputs ------------------------------------------------------------------------------

    def input_digest(self) -> int:
        """A digest of all inputs of calls (values, shapes, dtypes, parameters), and of the names of
        the results that are asked for."""
        wanted = (sorted(self.op.outputs), sorted(self.op.differentiable), self.op.mutated)
        given = hashlib.sha256(repr(wanted).encode())
        for seed in range(SEEDS):
            self.round = seed
            drawn = self._drawn()
            given.update(repr(sorted(drawn.params.items())).encode())
            for name, value in (*drawn.args.items(), *drawn.upstream.items()):
                for tensor in value if isinstance(value, list) else [value]:
                    what = None if tensor is None else (tensor.shape, tensor.dtype, digest(tensor))
                    given.update(f"{name}{what}".encode())
        return int.from_bytes(given.digest()[:8], "little")

    @contextmanager
    def _values_of(self, seed: int, place: int = SINGLE) -> Iterator[None]:
        """Calls in a `with` block get values from this seed, at addresses that later turns
        reuse."""
        before, self.values, self.place = self.round, PLACES * (seed + 1), place
        try:
            yield
        finally:
            self.round, self.values, self.place = before, None, SINGLE

    def _fresh(self, layout: str = "") -> Inputs:
        self.layout = layout or self.usual
        if self.values is not None:
            self.round = self.values + self.place
            return self._filled()
        self.round = (self.round + 1) % SEEDS
        return self._drawn()

    def _drawn(self) -> Inputs:
        """Copies of the inputs of a known seed."""
        return _copies(self._master())

    def _master(self) -> Inputs:
        """The inputs of a known seed, which are drawn once: drawing is slow."""
        seed = self.round % SEEDS
        if (seed, self.layout) not in self.masters:
            before, self.round = self.round, seed
            self.masters[seed, self.layout] = super()._drawn()
            self.round = before
        return self.masters[seed, self.layout]

    def _filled(self) -> Inputs:
        """Inputs with this round's values, in the memory that is kept for this place."""
        if self.place not in self.places:
            self.places[self.place] = _copies(self._master())
        return self._varied(self.places[self.place])

    def _varied(self, into: Inputs) -> Inputs:
        """Write this round's values into inputs."""
        generator = torch.Generator(self.device).manual_seed(self.round)
        numbers = torch.rand(FACTORS, generator=generator, device=self.device)
        numbers.sub_(0.5).mul_(WIDTH).add_(1)
        factors: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by width and dtype
        for kept, value in zip(_tensors(into), _tensors(self._master()), strict=True):
            if value.dtype.is_floating_point and value.numel() > 1 and 0 not in value.stride():
                key = width, _ = value.shape[-1], value.dtype
                if key not in factors:
                    repeated = numbers.repeat(-(-width // FACTORS)) if width > FACTORS else numbers
                    factors[key] = repeated[:width].to(value.dtype)
                torch.mul(value, factors[key], out=kept)
            else:
                kept.untyped_storage().copy_(value.untyped_storage())
        return into

    def _one_call(self, seed: int) -> dict[str, torch.Tensor]:
        """The results of a call on the inputs of a seed."""
        self.round = seed - 1
        self._prepare(self.passes[-1])
        self._run()
        return self._collected()

    # -- results -----------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare the results of the last call, of a layout, with the verified ones: they are near,
        and may have other bits. In a turn, note them instead."""
        got = self._collected()
        if self.values is not None:
            return self._note({self.round: got})
        kept = self.expected[self.round]
        for name, value in kept.results.items():
            if name not in got:
                raise WrongResultError(f"{self.case}: a timed call gave no {name}")
            error = apart(got[name], value).norm().item()
            if not error <= kept.allowed[name]:
                raise WrongResultError(
                    f"{self.case}: {name} of a timed call: {error:.3g} from what was verified, "
                    f"allowed {kept.allowed[name]:.3g}"
                )
        return None

    def _note(self, calls: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Note the results of timed calls, by their seeds of values."""
        notes = Note.of_calls(list(calls.values()), bits=self.exact)
        self.noted.update(zip(calls, notes, strict=True))


def _copies(inputs: Inputs) -> Inputs:
    return replace(
        inputs,
        args={name: copied(value) for name, value in inputs.args.items()},
        upstream={n: None if v is None else copied(v) for n, v in inputs.upstream.items()},
    )


def _tensors(inputs: Inputs) -> Iterator[torch.Tensor]:
    for value in (*inputs.args.values(), *inputs.upstream.values()):
        yield from (
            one for one in (value if isinstance(value, list) else [value]) if one is not None
        )
