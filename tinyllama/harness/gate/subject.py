"""A provider of an op on one case, as the gate times it.

Two clocks. Device time is of one call on cold caches, behind a spin kernel that outlasts the
enqueueing. Host time, and on a CPU all time, is of the fastest of some calls in a row: other work
on the machine only adds. Timed calls reuse the input addresses of the previous turn, as calls in a
training loop do; new addresses would differ between processes, and so would what a provider caches
by address. Their values are new in each turn (`tinyllama.harness.gate.proven`).

The backward pass runs in its caller's thread: handing it to autograd's thread for a device is
torch's cost, not that of the compared code.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinyllama.harness.check.evaluate import Inputs, Leaves
from tinyllama.harness.gate.proven import SINGLE, Proven
from tinyllama.harness.gate.turns import CALL, MEAN, mean_call
from tinyllama.harness.kernels.launch import Launched, launched
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.launches import launches
from tinyllama.harness.measure.op_contender import Timed
from tinyllama.harness.records.entries import Ratio

SPIN = 1.4  # times the time to enqueue a call; the device spins before each call that is timed
CALLS = 6  # of which the fastest count; one before them does not
DEVICE, HOST = "device_seconds", "host_seconds"


@dataclass
class _Call:
    """One of the repeated calls: its inputs, its results, its seconds."""

    round: int
    inputs: Inputs
    args: Leaves
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: Sequence[torch.Tensor | None] = ()
    seconds: float = math.inf


class Subject(Proven):
    """A provider on one case. metrics: those of its times."""

    def __init__(
        self,
        timed: Timed,
        device: str,
        package: str,
        files: Sequence[str],
        metrics: Sequence[str] = (DEVICE, HOST),
    ) -> None:
        super().__init__(timed, device, package, files)
        self.clock.longer = SPIN
        self.clocked = DEVICE in metrics and self.device.type != "cpu"
        self.repeated = DEVICE if self.device.type == "cpu" else HOST if HOST in metrics else None
        self.share = self.extra = 0.0  # added work: a share of a call, seconds on the device
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

    def rehearse(self) -> None:
        """What a first turn makes and later ones find, while nobody is timed."""
        with self._values_of(0):
            if self.clocked:
                self._prepare(self.passes[-1])
                self._run()
                self._check()
            if self.repeated is not None:
                self._note_all(self._repeat())
        self.noted.clear()

    def gated_turn(self, seed: int) -> dict[str, float]:
        """Seconds by metric, of calls on values from this seed alone. Their results are noted."""
        if not self.expected:
            raise ValueError(f"{self.case}: expect what was verified before a turn")
        self._calibrate()
        found: dict[str, float] = {}
        with self._values_of(seed):
            if self.clocked:
                reading = self._read(self.passes[-1])
                found |= {DEVICE: reading.device, CALL: max(reading.device, reading.host)}
            if self.repeated is not None:
                calls = self._repeat()
                self._note_all(calls)
                found[self.repeated] = self._fastest(calls)
                found[MEAN + self.repeated] = mean_call([one.seconds for one in calls[1:]])
        return found

    def _note_all(self, calls: Sequence[_Call]) -> None:
        found = {}
        for one in calls:
            self._take(one)
            found[one.round] = self._collected()
        self._note(found)

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
        try:
            return super().layouts(names, rounds)
        finally:
            self._keep_usual()

    def _keep_usual(self) -> None:
        """Return to the usual layout, and drop the inputs of others."""
        self.layout = self.usual
        self.masters = {key: kept for key, kept in self.masters.items() if key[1] == self.usual}

    def _repeat(self) -> list[_Call]:
        """Calls in a row, whose inputs were ready before the first."""
        calls = []
        for self.place in range(1 + CALLS):
            self._give(self.passes[-1])
            calls.append(_Call(self.round, self.inputs, self.args))
        self.place = SINGLE
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
        """The mean of two minima: of calls 1, 3, 5, ... and of calls 2, 4, 6, ... Call 0 does not
        count."""
        return statistics.mean(min(one.seconds for one in calls[n::2]) for n in (1, 2))

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

    # -- one call ---------------------------------------------------------------------------

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


def keep_busy(seconds: float) -> None:
    """Keep the host busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
