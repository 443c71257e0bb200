"""Measure ops: all providers of a case alternately, each kind of provider in its own process.

What is not timed happens at the same time: compiling, checking the first call, and counting kernels
and bytes. In every round caches are cold, inputs are fresh, and the outputs of each timed call are
checked; see `tinyllama.harness.measure.op_contender`.
"""

import contextlib
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

import torch
from msgspec.structs import replace

from tinyllama.bench.ceilings import Ceilings
from tinyllama.bench.contest import Contest
from tinyllama.bench.peers import OP_PEERS as PEERS
from tinyllama.bench.peers import PEER_FILES
from tinyllama.bench.workloads import SHORT_OPS
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.declare.op import Op
from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.harness.machine.worker import Worker, WorkerError, workers
from tinyllama.harness.measure.clock import Reading
from tinyllama.harness.measure.op_contender import (
    BOTH,
    Timed,
    passes_of,
    provider_of,
    timed_dtype,
    untimed,
)
from tinyllama.harness.measure.rounds import ratio, summary
from tinyllama.harness.records.entries import OpEntry, Ratio
from tinyllama.harness.records.targets import Bar, Standing, Target, covered, judged

PACKAGE = "tinyllama.ops"
BASELINE = "eager"  # over which every provider's ratio is: the reference of each op
DTYPES = ("bf16", "fp32")
COMPILING = 14  # cases at a time
ROOM = 5 * 2**30  # bytes of the GPU for each of them, whose process holds more than 1 GiB
CHECKING = 2  # first calls at a time: their references in float64 may take a tenth of the memory
# Many processes compile at the same time, so none of them starts a pool of its own.
_ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
STEPS_PARTS = ("block", "stack")  # a short run times them in the steps of the same shape
LAYOUT_ROUNDS = 12  # the fewest whose 99% interval leaves out the slowest round
LAYOUTS_CAVEAT = "the documents report 20 times of a step, 15 of 311 samples/s, for such inputs"
SHARED = "tinyllama.harness.measure.op_contender:OpContender"


def groups(device: torch.device) -> list[str]:
    """The groups of ops that are measured on a device."""
    return ["ops-bf16", "ops-fp32"] if device.type != "cpu" else ["ops-fp32"]


def short_groups(device: torch.device) -> list[str]:
    """Those of the short set: on a GPU, the largest case of each op but `STEPS_PARTS`."""
    return [*SHORT_OPS] if device.type != "cpu" else groups(device)


def compiling(device: torch.device) -> int:
    """How many cases are prepared at a time: fewer on a GPU with little memory."""
    if device.type == "cpu":
        return COMPILING
    _, total = torch.cuda.mem_get_info(device)
    return max(1, min(COMPILING, total // ROOM))


class OpCaseRun(Contest):
    """One case of an op, and what was measured of each provider.

    readings: of each round, by pass. repeated: host seconds of calls in a row.
    """

    def __init__(self, op: Op, case: int, dtype: str) -> None:
        super().__init__(f"{op.name} {case}")
        self.op, self.case, self.dtype = op, case, dtype
        self.readings: dict[str, dict[str, list[Reading]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.repeated: dict[str, list[float]] = {}
        self.layouts: dict[str, dict[str, Ratio]] = {}


@dataclass(frozen=True)
class Effort:
    warm_up: float
    rounds: int
    layout_rounds: int
    repeats: int  # rounds of calls in a row; on a CPU their host time is the time of the call

    @staticmethod
    def on(device: torch.device) -> "Effort":
        if device.type == "cpu":
            return Effort(warm_up=0.05, rounds=8, layout_rounds=LAYOUT_ROUNDS, repeats=0)
        return Effort(warm_up=0.2, rounds=10, layout_rounds=LAYOUT_ROUNDS, repeats=10)

    def short(self) -> "Effort":
        """For a short run, whose intervals are wider."""
        return with_fields(self, warm_up=0.1, rounds=8, repeats=0)


def cases_of(op: Op, device: torch.device) -> range:
    """Which of an op's timed cases are timed on a device; see `Op.timed`."""
    count = len(op.timed)
    return range(min(1, count)) if device.type == "cpu" or count == 1 else range(1, count)


def providers_of(op: Op) -> list[str]:
    return [*op.providers, "compile"]


class Bench:
    """Measures one case after the other, with a worker for each kind of provider.

    files: declare the ops, or register providers on them, beside the package. short: only the last
    case of each op, which is its largest, and none of `STEPS_PARTS`.
    """

    def __init__(
        self,
        dtype: str,
        device: torch.device,
        ops: Iterable[Op],
        files: Sequence[str] = PEER_FILES,
        *,
        short: bool = False,
    ) -> None:
        self.files = tuple(files)
        self.device = device
        effort = Effort.on(device)
        self.effort = effort.short() if short else effort
        self.runs = [
            OpCaseRun(op, case, timed_dtype(op, dtype))
            for op in ops
            if not short or op.name not in STEPS_PARTS
            for case in cases_of(op, device)[-1 if short else 0 :]
        ]
        self._processes: dict[str, Worker] = {}
        self._checking = threading.Semaphore(CHECKING)

    def measure(self) -> dict[str, OpCaseRun]:
        """Every case of every op, by name. A failure is kept with its provider."""
        with workers() as self._processes:
            # A process of compiled code takes more than 1 GiB of a GPU until its case is measured.
            at_once = compiling(self.device)
            for first in range(0, len(self.runs), at_once):
                lot = self.runs[first : first + at_once]
                self._prepare(lot)
                for run in lot:
                    self._measure_case(run)
        return {f"{run.op.name}-{run.op.timed[run.case]}": run for run in self.runs}

    def _process(self, run: OpCaseRun, provider: str) -> Worker:
        """One process for each kind of provider, and after a failure a fresh one; for compiled code
        one for each case, since the cases are compiled at the same time."""
        key = f"{provider} {run.key}" if provider == "compile" else provider
        if key not in self._processes or not self._processes[key].alive:
            preload = [SHARED.partition(":")[0]]
            self._processes[key] = Worker(key, preload=preload, env=_ONE_THREAD)
        return self._processes[key]

    def _prepare(self, lot: Sequence[OpCaseRun]) -> None:
        """Make and check all providers of some cases, in all processes at the same time: nothing is
        timed meanwhile."""
        by_process: dict[str, list[tuple[OpCaseRun, str]]] = {}
        for run in lot:
            for name in self._able(run):
                key = run.key if name == "compile" else name
                by_process.setdefault(key, []).append((run, name))

        def prepare(of_one_process: list[tuple[OpCaseRun, str]]) -> None:
            for run, name in of_one_process:
                with run.failing(name):
                    try:
                        self._ready(run, name)
                    except WorkerError as error:
                        if not error.raised(torch.OutOfMemoryError):
                            raise
                        # Others use the memory meanwhile; it is made again when they are done.
                        run.workers.pop(name).close()

        with ThreadPoolExecutor(max(1, len(by_process))) as pool:
            list(pool.map(prepare, by_process.values()))

    def _able(self, run: OpCaseRun) -> list[str]:
        """The providers that can be timed here; why others cannot is noted."""
        able = []
        for name in providers_of(run.op):
            provider = provider_of(run.op, name)
            reason = untimed(provider, self.device)
            if name != "compile" and reason is None:
                case = run.op.timed[run.case]
                reason = OpCase(run.op, provider, case, DTYPE_OF[run.dtype]).unsupported()
            if reason:
                run.cannot[name] = reason
            else:
                able.append(name)
        return able

    def _ready(self, run: OpCaseRun, name: str) -> None:
        """Make and check a provider in its process, unless it was; a process that replaces one in
        which another case failed has none yet."""
        worker = self._process(run, name)
        if run.workers.get(name) is worker:
            return
        run.workers[name] = worker
        timed = Timed(run.op.name, name, run.case, run.dtype)
        where, files = str(self.device), self.files
        worker.make(run.key, SHARED, timed=timed, device=where, package=PACKAGE, files=files)
        worker.call(run.key, "run_once")
        with self._checking:
            worker.call(run.key, "check_first")

    def _measure_case(self, run: OpCaseRun) -> None:
        ready = [name for name in providers_of(run.op) if name not in {*run.cannot, *run.failed}]
        for name in ready:
            with run.failing(name):
                self._ready(run, name)
                run.ask(name, "warm_up", self.effort.warm_up)
        run.workers = {name: run.workers[name] for name in ready if name in run.workers}
        for name, turns in run.rounds("turn", self.effort.rounds).items():
            run.readings[name] = {passes: [turn[passes] for turn in turns] for passes in turns[0]}
        run.facts = run.ask_all("facts", at_once=len(ready) or 1)
        for name, times in run.rounds("in_a_row", self.effort.repeats).items():
            if seconds := [time for time in times if time is not None]:
                run.repeated[name] = seconds
        if run.case == cases_of(run.op, self.device)[-1] and run.op.differentiable:
            layouts, rounds = tuple(run.op.layouts), self.effort.layout_rounds
            for name in [name for name in run.workers if bounded(run.op, name)]:
                with run.failing(name):
                    run.layouts[name] = run.ask(name, "layouts", layouts, rounds)
        run.readings = {n: readings for n, readings in run.readings.items() if n in run.workers}
        for name, worker in run.workers.items():
            if name == "compile":  # nothing of this process is used again
                worker.hang_up()
            else:
                with contextlib.suppress(WorkerError):
                    worker.drop(run.key)


def entries_of(run: OpCaseRun, ceilings: Ceilings) -> list[OpEntry]:
    """The entries of a case."""
    entries = []
    case = run.op.timed[run.case]
    values = _values(run.op, case)
    for provider in providers_of(run.op):
        reason = run.cannot.get(provider) or str(run.failed.get(provider, ""))
        for passes in passes_of(run.op):
            entry = OpEntry(
                name=f"op/{run.op.name}-{provider}-{case}-{run.dtype}-{values}/{passes}",
                op=run.op.name,
                provider=provider,
                role="peer" if provider in PEERS else "ours",
                case=str(case),
                dtype=run.dtype,
                values=values,
                passes=passes,
                cannot=reason or None,
            )
            entries.append(entry if reason else _measured(entry, run, ceilings))
    return entries


def bars(
    targets: Iterable[Target],
    runs: Mapping[str, OpCaseRun],
    entries: Iterable[OpEntry],
    device: str,
) -> list[Bar]:
    """Judge the targets by the entries, each at the cases that it covers, on a device of that name.
    A target without a measurement is missed, unless its provider, or every provider that it is
    compared with, cannot run here."""
    judgements = []
    for target, (op, case, *rest), of_case in covered(targets, entries):
        absent = _not_here(target, runs[f"{op}-{case}"])
        why = "its provider, or what it is over, cannot run here" if absent else ""
        about = f"{op}-{case}, {', '.join(rest)}: "
        judgements.append(judged(target, target.measured(of_case), device, why, about))
    return judgements


def bounded(op: Op, provider: str) -> bool:
    """Whether `Op.layouts` bounds a provider: one with kernels."""
    return provider in op.providers and op[provider].derived is not None


def bounded_layouts(runs: Iterable[OpCaseRun]) -> dict[str, tuple[Op, dict[str, Ratio]]]:
    """The slowdowns on other layouts, by case, of providers that have a bound."""
    return {
        f"{run.op.name}-{name}-{run.op.timed[run.case]}": (run.op, ratios)
        for run in runs
        for name, ratios in run.layouts.items()
        if bounded(run.op, name)
    }


def layout_bars(layouts: Mapping[str, tuple[Op, Mapping[str, Ratio]]]) -> list[Bar]:
    """Whether the median of each ratio is within the op's bar."""
    judgements = []
    for case, (op, ratios) in layouts.items():
        for layout, bar in op.layouts.items():
            ratio = ratios[layout]
            met = ratio.median <= bar
            text = f"{case}, {layout}: {ratio} times as long as contiguous, allowed {bar:g}"
            caveat = "" if met else f" ({LAYOUTS_CAVEAT})"
            judgements.append(Bar(Standing.MET if met else Standing.MISSED, text + caveat))
    return judgements


def _not_here(target: Target, run: OpCaseRun) -> bool:
    """Whether its provider, or each that it is compared with, cannot run here, for example because
    it is not installed. One that runs and fails is no excuse."""
    if target.who in run.cannot:
        return True
    rivals = set(target.over) & set(providers_of(run.op))
    return bool(rivals) and rivals <= set(run.cannot)


def _values(op: Op, case: Any) -> str:
    """The distributions of the inputs, the usual one left out; "normal(0,1)" if that is all."""
    named = {
        name: (case.values.get(name) or tensor.distribution(case.dims)).name
        for name, tensor in op.inputs.items()
    }
    unusual = [f"{name}={value}" for name, value in named.items() if value != "normal(0,1)"]
    return ",".join(unusual) or "normal(0,1)"


def _measured(entry: OpEntry, run: OpCaseRun, ceilings: Ceilings) -> OpEntry:
    """An entry with its figures."""
    op, case, provider = run.op, run.op.timed[run.case], entry.provider
    size = {"fp32": 4}.get(run.dtype, 2)
    kinds = ("forward", "backward") if entry.passes == BOTH else ("forward",)
    moved = sum(op.bytes[kind](size, **case.dims) for kind in kinds if kind in op.bytes)
    flops = sum(op.flops[kind](**case.dims) for kind in kinds if kind in op.flops)
    readings = run.readings[provider][entry.passes]
    seconds = {
        name: [reading.device for reading in by_passes[entry.passes]]
        for name, by_passes in run.readings.items()
    }
    over = {name: ratio(theirs, seconds[provider]) for name, theirs in seconds.items()}
    ours, last = entry.role == "ours", entry.passes == passes_of(op)[-1]
    in_a_row = run.repeated.get(provider) if last else None
    median = statistics.median(seconds[provider])
    by_bytes, by_flops = moved / ceilings.copy(), flops / ceilings.product(run.dtype)
    return replace(
        entry,
        **summary("seconds", seconds[provider]),
        **summary("host_seconds", [reading.host for reading in readings]),
        **(summary("repeated_host_seconds", in_a_row) if in_a_row else {}),
        rounds=len(readings),
        **run.facts[provider][entry.passes],
        bytes=moved,
        flops=flops,
        bandwidth_share=by_bytes / median,
        roofline_share=max(by_bytes, by_flops) / median,
        bound="bandwidth" if by_bytes >= by_flops else "products",
        queued=None if all(reading.queued for reading in readings) else False,
        baseline=BASELINE if BASELINE in over else None,
        over_baseline=over.get(BASELINE),
        over={name: times for name, times in over.items() if name != provider} if ours else None,
        layouts=run.layouts.get(provider) if last else None,
    )
