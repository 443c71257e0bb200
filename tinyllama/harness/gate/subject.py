"""A provider of an op on one case, as the gate times it.

Inputs are the same on both sides and in every block. They alternate between two seeds, so that a
result kept from the previous call is wrong. A call counts only if its results are, bit for bit,
those of a call that was held to float64; for a provider that is not deterministic, within the
allowed error.

Two clocks. Device time is of one call on cold caches, behind a spin kernel that outlasts the
enqueueing. Host time, and on a CPU all time, is of the fastest of some calls in a row on the inputs
of each seed: other work on the machine only adds. These calls reuse the input addresses of the
previous turn, as calls in a training loop do; new addresses would differ between processes, and so
would what a provider caches by address.

The backward pass runs in its caller's thread: handing it to autograd's thread for a device is
torch's cost, not that of the compared code.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from tinyllama.harness.correct.evaluate import Inputs, Leaves, copied, evaluate
from tinyllama.harness.gate.digests import bits_of, digest
from tinyllama.harness.gate.turns import CALL, MEAN, mean_call
from tinyllama.harness.gate.verified import Proof, as_proven, proven
from tinyllama.harness.kernels.launch import Launched, launched
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.launches import launches
from tinyllama.harness.measure.op_contender import OpContender, Timed, WrongResultError
from tinyllama.harness.records.entries import Ratio

SEEDS = 2
CALLS = 6  # of which the fastest count; one before them does not
DEVICE, HOST = "device_seconds", "host_seconds"


@dataclass
class _Expected:
    """For one seed: the results that a call must give, and the allowed distance from them."""

    results: dict[str, torch.Tensor]
    allowed: dict[str, float] = field(default_factory=dict)


@dataclass
class _Call:
    """One of the repeated calls: its inputs, its results, its seconds."""

    round: int
    inputs: Inputs
    args: Leaves
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: Sequence[torch.Tensor | None] = ()
    seconds: float = math.inf


class Subject(OpContender):
    """A provider on one case, whose inputs alternate between two seeds. metrics: those of its
    times."""

    def __init__(
        self,
        timed: Timed,
        device: str,
        package: str,
        files: Sequence[str],
        metrics: Sequence[str] = (DEVICE, HOST),
    ) -> None:
        super().__init__(timed, device, package, files)
        self.clocked = DEVICE in metrics and self.device.type != "cpu"
        self.repeated = DEVICE if self.device.type == "cpu" else HOST if HOST in metrics else None
        self.expected: dict[int, _Expected] = {}
        self.masters: dict[tuple[int, str], Inputs] = {}  # by seed and layout
        self.places: list[Inputs] = []  # of the repeated calls, in order
        self.place: int | None = None  # of the repeated call that is prepared
        self.turns = self.offset = 0  # of repeated calls; what is added to the seeds of inputs
        self.share = self.extra = 0.0  # added work: a share of a call, seconds on the device
        self.exact = self.device.type in self.case.provider.deterministic
        self.kept_bytes = 0  # by the first call, for later ones

    def run_once(self) -> None:
        """Compile everything that a call needs, and note the bytes that stay allocated."""
        self._prepare(self.passes[-1])
        before = self._allocated()
        self._run()
        self.outputs, self.gradients = (), ()
        self.kept_bytes = max(0, self._allocated() - before)
        self._forget()

    def _allocated(self) -> int:
        synchronize(self.device)
        return 0 if self.device.type == "cpu" else torch.cuda.memory_allocated(self.device)

    def slow_down(self, share: float) -> None:
        """Add work that takes a share of the call's time: of device time, read before the first
        turn, where that is a metric; else of each call's own time on the host."""
        self.share = share

    def _calibrate(self, readings: int = 5) -> None:
        """In a turn, since while this is made the other side is made on the same device."""
        if self.share and self.clocked and not self.extra:
            name = self.passes[-1]
            read = [
                self.clock.read(self._run, before=lambda: self._prepare(name)).device
                for _ in range(1 + readings)
            ]
            self.extra = self.share * statistics.median(read[1:])

    def verify(self) -> list[dict[str, Proof]]:
        """Hold the results of each seed to float64, and a call to leave its inputs unchanged.
        Returns the proofs that later calls are held to.

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
        slack = self.case.provider.slack.get(self.case.dtype, 1.0)
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
        """Hold one call of each seed to what was verified, and keep its results.

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

    def rehearse(self) -> None:
        """What a first turn makes and later ones find, while nobody is timed."""
        if self.clocked:
            self._prepare(self.passes[-1])
            self._run()
            self._check()
        if self.repeated is not None:
            for one in self._repeat():
                self._take(one)
                self._check()

    def gated_turn(self) -> dict[str, float]:
        self._calibrate()
        found: dict[str, float] = {}
        if self.clocked:
            reading = self._read(self.passes[-1])
            found |= {DEVICE: reading.device, CALL: max(reading.device, reading.host)}
        if self.repeated is not None:
            calls = self._repeat()
            for one in calls:
                self._take(one)
                self._check()
            found[self.repeated] = self._fastest(calls)
            found[MEAN + self.repeated] = mean_call([one.seconds for one in calls[1:]])
        return found

    def fresh_turn(self, secret: int) -> dict[str, float]:
        """A turn on values that no process has seen, held to what eager gives for them.

        Raises WrongResultError.
        """
        expected, exact, masters, before = self.expected, self.exact, self.masters, self.round
        allowed = {
            name: max(one.allowed[name] for one in expected.values())
            for name in next(iter(expected.values())).allowed
        }
        self.offset, self.exact, self.masters = SEEDS * secret, False, {}
        try:
            self.expected = {}
            # A single call takes the inputs that follow those of this round.
            for seed in range(SEEDS if self.repeated else 1):
                self.round = seed
                results = evaluate(self.op, self.op["eager"].call, self._drawn())
                self.expected[seed] = _Expected(results, allowed)
            self.round = SEEDS - 1
            return self.gated_turn()
        finally:
            self.offset, self.exact, self.masters, self.round = 0, exact, masters, before
            self.expected = expected

    def ready(self) -> None:
        """Prepare for `paced`."""
        self._prepare(self.passes[-1])
        synchronize(self.device)

    def paced(self, calls: int) -> float:
        """Seconds of calls in a row by this process's clock. The caller takes their time too."""
        start = time.perf_counter()
        for _ in range(calls):
            self._run()
        synchronize(self.device)
        return time.perf_counter() - start

    def compile_layouts(self, names: Sequence[str]) -> None:
        """Compile what calls on other layouts need; none is timed."""
        for name in ("contiguous", *names):
            self._give(self.passes[-1], name)
            self._run()
        self._keep_usual()
        self._forget()

    def layouts(self, names: Sequence[str], rounds: int) -> dict[str, Ratio]:
        """As of `OpContender`, on inputs that are not kept. Results of another layout may have
        other bits than those that were verified, and are held to their allowed error."""
        exact, self.exact = self.exact, False
        try:
            return super().layouts(names, rounds)
        finally:
            self.exact = exact
            self._keep_usual()

    def _keep_usual(self) -> None:
        """Return to the usual layout, and drop the inputs of others."""
        self.layout = self.usual
        self.masters = {key: kept for key, kept in self.masters.items() if key[1] == self.usual}

    def _repeat(self) -> list[_Call]:
        """Calls in a row, whose inputs were ready before the first."""
        calls = []
        self.turns += 1
        self.round = self.turns  # each place gets the inputs of the other seed than before
        for self.place in range(1 + CALLS):
            self._give(self.passes[-1])
            calls.append(_Call(self.round, self.inputs, self.args))
        self.place = None
        synchronize(self.device)
        for one in calls:
            self._take(one)
            start = time.perf_counter()
            self._run()
            one.seconds = time.perf_counter() - start
            one.outputs, one.gradients = self.outputs, self.gradients
        synchronize(self.device)
        return calls

    def _take(self, one: _Call) -> None:
        self.round, self.inputs, self.args = one.round, one.inputs, one.args
        self.outputs, self.gradients = one.outputs, one.gradients

    @staticmethod
    def _fastest(calls: Sequence[_Call]) -> float:
        """The mean over the seeds of the fastest call on each one's inputs."""
        fastest: dict[int, float] = {}
        for one in calls[1:]:
            fastest[one.round] = min(one.seconds, fastest.get(one.round, math.inf))
        return statistics.mean(fastest.values())

    def launched(self) -> list[Launched]:
        if self.device.type == "cpu":
            return []
        self._prepare(self.passes[-1])
        with launched() as found:
            self._run()
        synchronize(self.device)
        return found

    def counted(self) -> dict[str, int]:
        if self.device.type == "cpu":
            return {}
        self._calibrate()
        self._prepare(self.passes[-1])
        peak = self._peak()
        self._prepare(self.passes[-1])
        counted = launches(self._run, self.device).counts
        found = {"peak_bytes": peak, "kept_bytes": self.kept_bytes, **counted}
        return {name: value for name, value in found.items() if value is not None}

    def profile(self) -> dict[str, tuple[int, float]]:
        """By kernel of one call: how often it ran, and its seconds in all."""
        self._calibrate()
        self._prepare(self.passes[-1])
        return launches(self._run, self.device).by_name

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

    # -- one call ---------------------------------------------------------------------------

    def _fresh(self, layout: str = "") -> Inputs:
        self.round = (self.round + 1) % SEEDS
        self.layout = layout or self.usual
        return self._drawn()

    def _drawn(self) -> Inputs:
        """Copies of the inputs of this round's seed, which are drawn once: drawing is slow."""
        key = self.round, self.layout
        if key not in self.masters:
            self.masters[key] = self._made()
        master = self.masters[key]
        if self.place is None:
            return _copies(master)
        if self.place == len(self.places):
            self.places.append(_copies(master))
        for kept, value in zip(_tensors(self.places[self.place]), _tensors(master), strict=True):
            kept.untyped_storage().copy_(value.untyped_storage())
        return self.places[self.place]

    def _made(self) -> Inputs:
        before, self.round = self.round, self.round + self.offset
        try:
            return super()._drawn()
        finally:
            self.round = before

    def _one_call(self, seed: int) -> dict[str, torch.Tensor]:
        """The results of a call on the inputs of a seed."""
        self.round = seed - 1
        self._prepare(self.passes[-1])
        self._run()
        return self._collected()

    def _run(self) -> None:
        began = time.perf_counter() if self.share else 0.0
        with torch.autograd.set_multithreading_enabled(False):
            super()._run()
        if self.extra:
            self.clock.queue.spin(self.extra)
        elif self.share and not self.clocked:
            keep_busy(self.share * (time.perf_counter() - began))

    def _shrink(self) -> None:
        """Keep the case as it is: no check of this class takes much memory."""

    def _check(self) -> None:
        """Hold the results of the last call to those that were verified."""
        got, kept = self._collected(), self.expected[self.round]
        for name, value in kept.results.items():
            if name not in got:
                raise WrongResultError(f"{self.case}: a timed call gave no {name}")
            if self.exact:
                if not torch.equal(bits_of(got[name]), bits_of(value)):
                    raise WrongResultError(
                        f"{self.case}: {name} of a timed call is not, bit for bit, what was "
                        "verified: it is wrong, or its provider is not deterministic"
                    )
                continue
            error = (got[name].double() - value.double()).norm().item()
            if not error <= kept.allowed[name]:
                raise WrongResultError(
                    f"{self.case}: {name} of a timed call: {error:.3g} from what was verified, "
                    f"allowed {kept.allowed[name]:.3g}"
                )


def keep_busy(seconds: float) -> None:
    """Keep the host busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


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
