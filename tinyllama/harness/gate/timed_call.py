"""A provider of an op on one case, as the gate times and verifies it.

A metric has two readings (`tinyllama.harness.gate.metric`). Device time is of one call, on cold
caches, behind a spin kernel that outlasts the enqueueing. Host time, and on a CPU all time, is of
the fastest of some calls in a row: other work on the machine only adds. All work is of a row of
calls whose results are dropped as they come; on a GPU until the device is idle. After a row of
products an H200 has a lower clock: a device time that followed one differed by 1.2% between blocks
of equal sides, without one by 0.1%. So rows have turns of their own, after those of device time.

Each turn has input values that no process has seen: the case's own, with each feature (along the
last dimension) multiplied by a number near 1. These numbers come from a seed that the
judge draws when it asks for the turn. So both sides get the same values, making them costs as much
as a copy, and they are written to the addresses of the turn before, as in a training loop. Drawing
all values anew would take 5 to 25 times as long as a turn on a CPU. Integers, single numbers and
inputs with a stride of 0 keep their values.

In a block's last turn of a figure one call, chosen at random by the judge among those whose time it
is, keeps its results, which are then held to float64.

The backward pass runs in its caller's thread: handing it to autograd's thread for a device is
torch's cost, not that of the compared code.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from tinyllama.harness.check.evaluate import Inputs, Leaves, copied, evaluate
from tinyllama.harness.declare.op import Provider
from tinyllama.harness.gate.benchmarks import layouts_of
from tinyllama.harness.gate.metric import ALL_WORK, CALL, DEVICE, HOST
from tinyllama.harness.gate.verification import Proof, digest, proofs_of
from tinyllama.harness.kernels.launch import Launched, launched
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.clock import Clock
from tinyllama.harness.measure.launches import launches
from tinyllama.harness.measure.op_contender import OpContender, Timed
from tinyllama.harness.measure.right_results import WrongResultError

SPIN = 1.4  # times the time to enqueue a call; the device spins before each call that is timed
CALLS = 7  # in a row on the host; the first counts as work, and not among the fastest
DEVICE_CALLS = 3  # in a row on the device
FACTORS, WIDTH = 1024, 0.125  # how many numbers near 1; from 1 - WIDTH/2 to 1 + WIDTH/2


@dataclass
class _Call:
    """A call of a turn: the seed and place of its inputs, what it got and gave, and its seconds on
    the host."""

    seed: int
    place: int
    inputs: Inputs
    args: Leaves
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: Sequence[torch.Tensor | None] = ()
    seconds: float = math.inf


class TimedCall(OpContender):
    """A provider on one case. metrics: what is timed."""

    def __init__(
        self,
        timed: Timed,
        device: str,
        package: str,
        files: Sequence[str],
        metrics: Sequence[str] = (DEVICE, HOST),
    ) -> None:
        super().__init__(timed, device, package, files)
        # Turns repeat one call: its last enqueueing says how long the next spin is.
        self.clock, self.row_clock = (
            Clock(self.clock.queue, longer=SPIN, shortened=0.0) for _ in range(2)
        )
        self.clocked = DEVICE in metrics and self.device.type != "cpu"
        self.repeated = DEVICE if self.device.type == "cpu" else HOST if HOST in metrics else None
        self.masters: dict[str, Inputs] = {}  # by layout
        self.places: dict[int, Inputs] = {}  # of timed calls: filled anew for each turn
        self.arguments: dict[str, torch.Tensor] = {}  # of verified calls, by name
        self.seed = self.place = 0  # of the values of a turn; of the call that is prepared
        self.retained: _Call | None = None  # of the last turn of a figure, where the judge asked
        self.kept_bytes = 0  # that the first call leaves allocated

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

    # -- a turn -----------------------------------------------------------------------------

    def gated_turn(self, seed: int, call_number: int | None = None) -> dict[str, float]:
        """Seconds of a call, by reading, on values from this seed alone.

        call_number: any number; the call of that number, modulo their number, keeps its results for
        `proofs`. Of device time there is one call.
        """
        self.seed, self.retained = seed, None
        if not self.clocked:
            return self._host_row(-1 if call_number is None else call_number % CALLS)
        self.place = CALLS + 1  # which no row fills
        reading = self.clock.read(self._run, self._prepare_last)
        if call_number is not None:
            self.retained = _Call(
                seed, self.place, self.inputs, self.args, self.outputs, self.gradients
            )
        self.place = 0
        return {DEVICE: reading.device, CALL: max(reading.device, reading.host)}

    def gated_row(self, seed: int) -> dict[str, float]:
        """The readings that `gated_turn` does not give where it gives device time."""
        self.seed = seed
        work = self.row_clock.all_work(self._run_in_a_row, self._prepare_last)
        host = self._host_row(-1) if self.repeated else {}
        return {ALL_WORK + DEVICE: work / DEVICE_CALLS, **host}

    def _host_row(self, kept: int) -> dict[str, float]:
        """The host's time of calls in a row, on a CPU all time. kept: the call that is kept."""
        assert self.repeated is not None
        calls = self._row()
        began = perf_counter()
        for number, call in enumerate(calls):
            self._take(call, keep=number == kept)
        work = perf_counter() - began
        synchronize(self.device)
        return {self.repeated: _fastest(calls), ALL_WORK + self.repeated: work / CALLS}

    def _prepare_last(self) -> None:
        """Prepare a call of the last pass: its inputs are written, then the cache is flushed."""
        self.outputs, self.gradients = (), ()
        self._prepare(self.passes[-1])

    def _run_in_a_row(self) -> None:
        for _ in range(DEVICE_CALLS):
            self._run()
            self.outputs, self.gradients = (), ()  # here, where what ends with them is timed

    def _row(self) -> list[_Call]:
        """Calls whose inputs are ready before the first."""
        calls = []
        for self.place in range(1, CALLS + 1):
            self._give(self.passes[-1])
            calls.append(_Call(self.seed, self.place, self.inputs, self.args))
        self.place, self.outputs, self.gradients = 0, (), ()
        synchronize(self.device)
        return calls

    def _take(self, call: _Call, *, keep: bool) -> None:
        self.inputs, self.args = call.inputs, call.args
        began = perf_counter()
        self._run()
        call.seconds = perf_counter() - began
        if keep:
            call.outputs, call.gradients, self.retained = self.outputs, self.gradients, call
        self.outputs, self.gradients = (), ()  # here, where what ends with them is timed

    def ready(self) -> None:
        """Prepare for `paced`."""
        self._prepare(self.passes[-1])
        synchronize(self.device)

    def paced(self, calls: int) -> None:
        """Make calls in a row, until the device is idle. The judge takes their time."""
        for _ in range(calls):
            self._run()
        synchronize(self.device)

    # -- right results ----------------------------------------------------------------------

    def verify(self, seed: int) -> dict[str, Proof]:
        """Hold a call on the values of a seed to float64, and check that it leaves its inputs
        unchanged; a provider with kernels or a backward pass of its own also on each layout of the
        op. Raises WrongResultError."""
        return self._proofs_of(self.case.provider, seed)

    def reference(self, seed: int) -> dict[str, Proof]:
        """What the reference gives on the same values and layouts."""
        return self._proofs_of(self.op["eager"], seed)

    def _proofs_of(self, provider: Provider, seed: int) -> dict[str, Proof]:
        self.seed = seed
        layouts, proofs = [self.declared_layout], dict[str, Proof]()
        tested = self.case.provider
        # What compositions of torch's functions take is torch's decision.
        of_its_own = tested.derived is not None or "triton" in tested.requires
        if self.declared_layout == "contiguous" and of_its_own:
            layouts += layouts_of(self.op, tested)
        for layout in layouts:
            inputs = self._varied(self._master(layout), 0)
            what = "" if layout == self.declared_layout else f"{layout} inputs: "
            try:
                results = evaluate(
                    self.op,
                    provider.call,
                    inputs,
                    provider.overwrites,
                    place=self._argument if layout == self.declared_layout else None,
                    dtypes=provider.output_dtypes,
                )
            except AssertionError as error:
                raise WrongResultError(f"{self.case}: {what}{error}") from error
            proven = self._proven(results, inputs, what)
            proofs |= {f"{what}{name}": proof for name, proof in proven.items()}
        return proofs

    def _argument(self, value: Any, name: str) -> Any:
        """A copy of an argument, at the address that the last verified call had: a result that was
        kept by an address is of other values."""
        if value is None:
            return None
        if isinstance(value, list):
            return [self._argument(x, f"{name}[{place}]") for place, x in enumerate(value)]
        if name not in self.arguments:
            self.arguments[name] = copied(value)
        self.arguments[name].untyped_storage().copy_(value.untyped_storage())
        return self.arguments[name].detach()

    def proofs(self) -> dict[str, Proof]:
        """Hold the call that the last turn kept to float64. Raises WrongResultError, and ValueError
        where none was kept."""
        if self.retained is None:
            raise ValueError(f"{self.case}: the last turn kept no call")
        call = self.retained
        self.seed, self.inputs, self.args = call.seed, call.inputs, call.args
        self.outputs, self.gradients = call.outputs, call.gradients
        inputs = self._varied(self._master(), call.place)
        return self._proven(self._collected(), inputs, "a timed call: ")

    def _proven(
        self, results: dict[str, torch.Tensor], inputs: Inputs, what: str
    ) -> dict[str, Proof]:
        slack = self.case.provider.slack_in(self.case.dtype)
        return proofs_of(results, self._require_right(results, inputs, what), slack)

    def input_digest(self) -> int:
        """A digest of the inputs (values, shapes, dtypes, parameters), and of the names of the
        results that are asked for."""
        drawn, op = self._master(), self.op
        names = (sorted(op.outputs), sorted(op.differentiable), op.mutated)
        return digest([*tensors_of(drawn)], names, sorted(drawn.params.items()), list(drawn.args))

    # -- what is counted --------------------------------------------------------------------

    def launched(self) -> list[Launched]:
        if self.device.type == "cpu":
            return []
        self._prepare(self.passes[-1])
        with launched() as launches_seen:
            self._run()
        synchronize(self.device)
        return launches_seen

    def counted(self) -> dict[str, int]:
        if self.device.type == "cpu":
            return {}
        self._prepare(self.passes[-1])
        peak = self._peak()
        self._prepare(self.passes[-1])
        counted = launches(self._run, self.device).counts
        counts = {"peak_bytes": peak, "kept_bytes": self.kept_bytes, **counted}
        return {name: value for name, value in counts.items() if value is not None}

    def profile(self) -> dict[str, tuple[int, float]]:
        """By kernel of one call: how often it ran, and its seconds in all."""
        self._prepare(self.passes[-1])
        return launches(self._run, self.device).by_name

    # -- one call ---------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            super()._run()

    # -- inputs -----------------------------------------------------------------------------

    def _fresh(self, layout: str = "") -> Inputs:
        """The inputs of the next call: with the values of this turn, in the memory that is kept for
        its place."""
        if self.place not in self.places:
            self.places[self.place] = _copies(self._master())
        return self._varied(self._master(), self.place, self.places[self.place])

    def _master(self, layout: str = "") -> Inputs:
        """The inputs of a layout (by default that which is timed) of which those of each call are
        made; drawn once, since drawing is slow."""
        layout = layout or self.declared_layout
        if layout not in self.masters:
            self.layout = layout
            self.masters[layout] = self._drawn()
            self.layout = self.declared_layout
        return self.masters[layout]

    def _varied(self, master: Inputs, place: int, into: Inputs | None = None) -> Inputs:
        """The values of this turn's call, written into inputs, by default new ones."""
        into = into or _copies(master)
        generator = torch.Generator(self.device).manual_seed((2 + CALLS) * self.seed + place)
        numbers = torch.rand(FACTORS, generator=generator, device=self.device, dtype=torch.float32)
        numbers.sub_(0.5).mul_(WIDTH).add_(1)
        factors: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by width and dtype
        for target, value in zip(tensors_of(into), tensors_of(master), strict=True):
            if value.dtype.is_floating_point and value.numel() > 1 and 0 not in value.stride():
                key = width, dtype = value.shape[-1], value.dtype
                if key not in factors:
                    factors[key] = numbers.repeat(-(-width // FACTORS))[:width].to(dtype)
                torch.mul(value, factors[key], out=target)
            else:
                target.untyped_storage().copy_(value.untyped_storage())
        return into


def _fastest(calls: Sequence[_Call]) -> float:
    """The mean of two minima, of calls 1, 3, 5, ... and of calls 2, 4, 6, ..., without call 0."""
    return statistics.mean(min(call.seconds for call in calls[n::2]) for n in (1, 2))


def _copies(inputs: Inputs) -> Inputs:
    return replace(
        inputs,
        args={name: copied(value) for name, value in inputs.args.items()},
        upstream={n: None if v is None else copied(v) for n, v in inputs.upstream.items()},
    )


def tensors_of(inputs: Inputs) -> Iterator[torch.Tensor]:
    """Every tensor of the inputs, and of the gradients of the outputs."""
    for value in (*inputs.args.values(), *inputs.upstream.values()):
        tensors = value if isinstance(value, list) else [value]
        yield from (tensor for tensor in tensors if tensor is not None)
