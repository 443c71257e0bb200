"""Measure a group: every contender in a worker of its own, and all of them alternately.

The order matters. Contenders are made at the same time, since compiling leaves the device idle;
after that only one works at a time. Memory is read before anything but a step has run, and
gradients are checked before any time is taken. Then all contenders are timed alternately. What
disturbs the device (profiler, energy) comes after that. What needs the memory of other contenders
comes last.
"""

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from functools import partial
from threading import Lock
from typing import Any

import torch
from msgspec.structs import replace

from tinyllama.bench.contender import Contender
from tinyllama.bench.peers import CLIENT, PEERS
from tinyllama.bench.steps import UNTIMED
from tinyllama.bench.workloads import ALL, Group, at_once
from tinyllama.harness.machine.worker import Worker, WorkerError, close_all, workers
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, Ratio, interleaved, ratio, summary
from tinyllama.harness.records.entries import StepEntry
from tinyllama.harness.records.targets import FASTEST_PEER, Bar, Target, covered, judged
from tinyllama.model.tiers import TIERS, V1, Tier

FLOOR = Contender(
    "floor", "products, attention, AdamW alone", "floor", "tinyllama.bench.floor:Floor", alone=True
)
BASELINE = V1.name  # over which every step's ratio is
LONGEST = 400.0  # seconds until a contender must be ready; a group should take less than 10 min
SWEEP_ROUNDS = 10  # of each size of a sweep
LEARNED = 0.9  # of what the baseline learned on the same batches: far more than embeddings alone


def _tier(tier: Tier, also: str = "", *requires: str, **arguments: str) -> Contender:
    """also: what is apart from the default, in words, where ``arguments`` ask for another way."""
    name, title = "-".join([tier.name, *arguments.values()]), tier.title + (also and f", {also}")
    needs = ("gpu", "triton", *requires) if tier.interpreted else ()  # interpreted, none is timed
    factory = "tinyllama.bench.steps:TierStep"
    return Contender(name, title, "tier", factory, {"tier": tier.name, **arguments}, needs)


SINGLE = with_fields(
    _tier(TIERS["v4"], "one launch for a block", "cooperative", plan="single"),
    only=(
        tuple(str(group) for group in ALL if str(group) not in ("medium-fp32", "medium-tf32")),
        "it takes ten times as long as V4 in tf32 (docs/design.md), and memory that others need",
    ),
)
INTERPRETED = [tier for tier in TIERS.values() if tier.interpreted]
CONTENDERS = (
    *map(_tier, TIERS.values()),
    SINGLE,
    *(_tier(tier, "small memory", memory="small") for tier in INTERPRETED),
    *PEERS,
    CLIENT,
    FLOOR,
)


# What a short run times of a workload: the tiers that a bar compares, and the fastest peer.
SHORT = {
    "small": ("v1", "v2", "v3", "v4", "v4-single", "hf-compile"),
    "medium": ("v1", "v3", "v4", "hf-compile"),
}
NOT_SHORT = "it is not in the short set"


@dataclass(frozen=True)
class Effort:
    """How long to measure. turn: seconds of one turn of one contender, which is at least one step
    and at most ``calls``. total: seconds of all turns, in as many rounds as fit and at most
    ``rounds``. The host's speed changes between turns more than within one
    (docs/design.md), so more rounds of fewer steps give a narrower interval in the same
    time."""

    warm_up: float
    turn: float
    calls: int
    rounds: int
    total: float
    readings: int
    energy: float

    @staticmethod
    def on(device: torch.device) -> "Effort":
        if device.type == "cpu":
            return Effort(
                warm_up=0.3, turn=0.03, calls=25, rounds=15, total=20, readings=5, energy=0
            )
        return Effort(
            warm_up=1.0, turn=0.1, calls=25, rounds=40, total=150, readings=10, energy=1.5
        )

    def short(self) -> "Effort":
        """For a short run: rounds of fewer steps, and fewer readings."""
        return with_fields(
            self, warm_up=0.5, turn=0.05, calls=12, rounds=60, total=20, readings=5, energy=1.0
        )


@dataclass
class Measured:
    """The results of a group, by contender: the seconds of each round, an entry without the fields
    computed from these, the loss of each step, and what went wrong."""

    group: Group
    seconds: dict[str, list[float]] = field(default_factory=dict)
    entries: dict[str, StepEntry] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)
    failed: dict[str, WorkerError] = field(default_factory=dict)

    def over(self, slow: str, fast: str) -> Ratio:
        """How many times longer one contender takes than another."""
        return ratio(self.seconds[slow], self.seconds[fast])


def measure(
    group: Group,
    device: torch.device,
    contenders: tuple[Contender, ...] = CONTENDERS,
    *,
    short: bool = False,
) -> Measured:
    """Measure a group. The failure of a contender is kept with its name. short: see `SHORT`."""
    with prepared([group], device, contenders, short=short) as (run,):
        return run.measure()


def measure_times(
    group: Group, device: torch.device, contenders: tuple[Contender, ...], **size: int
) -> Measured:
    """Memory and time of a few rounds in another size. size: ``batch_size``, ``seq_len``."""
    with prepared([group], device, contenders, size=size) as (run,):
        run.effort = with_fields(run.effort, rounds=SWEEP_ROUNDS, warm_up=run.effort.warm_up / 2)
        run.time()
        return run.measured


@contextlib.contextmanager
def prepared(
    groups: Sequence[Group],
    device: torch.device,
    contenders: tuple[Contender, ...] = CONTENDERS,
    *,
    short: bool = False,
    size: Mapping[str, int] | None = None,
) -> Iterator[list["Run"]]:
    """Runs of some groups, to be measured one after the other: all contenders are made at the same
    time, so one GPU must hold them all."""
    with contextlib.ExitStack() as stack:
        runs = []
        for group in groups:
            run = Run(group, device, stack.enter_context(workers()), short, size)
            run.start(contenders)
            runs.append(run)
        # What comes last is larger, and takes longer to compile.
        prepare([(run, contender) for run in reversed(runs) for contender in contenders])
        yield runs


def prepare(pairs: Sequence[tuple["Run", Contender]]) -> None:
    """Make contenders at the same time. One that is ready is checked while others are made."""
    able = [(run, contender) for run, contender in pairs if contender.name in run.workers]
    most = min((run.most for run, _ in able), default=1)
    together = [pair for pair in able if not pair[1].alone and most > 1]
    checking = Lock()
    for lot in [together, *([pair] for pair in able if pair not in together)]:
        beside = min(most, len(lot)) - 1
        with ThreadPoolExecutor(most) as pool:
            ready = [pool.submit(run.make, contender, beside, checking) for run, contender in lot]
        again = [pair for pair, future in zip(lot, ready, strict=True) if not future.result()]
        for run, contender in again:
            run.workers[contender.name] = contender.worker()
            run.make(contender, 0, checking)
    for run in {run for run, _ in able}:
        entries = run.measured.entries
        names = [contender.name for other, contender in able if other is run]
        run.measured.entries = {name: entries[name] for name in names if name in entries}


class Run:
    """Of one group: its contenders in processes of their own, and what was measured of them."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        workers: dict[str, Worker],
        short: bool = False,
        size: Mapping[str, int] | None = None,
    ) -> None:
        self.group = group
        self.size = size or {}  # other than the workload's
        self.device = device
        self.workers = workers
        self.short = short
        self.measured = Measured(group)
        self.effort = Effort.on(device).short() if short else Effort.on(device)
        self.most = at_once(group, short)

    def start(self, contenders: Iterable[Contender]) -> None:
        """Start a process for each contender that can be measured here."""
        for contender in contenders:
            left_out = self.short and contender.name not in SHORT[self.group.workload]
            reason = NOT_SHORT if left_out else contender.cannot(self.device, str(self.group))
            if reason:
                self.measured.cannot[contender.name] = reason
            else:
                self.workers[contender.name] = contender.worker()

    def measure(self) -> Measured:
        """Measure those that were made, and end their processes: they hold memory."""
        self.time()
        self.look_closer()
        close_all(self.workers.values())
        return self.measured

    def make(self, contender: Contender, beside: int, checking: Lock) -> bool:
        """Make and check a contender. Returns whether it need not be made again: not where it
        lacked memory that others needed only to be made and checked."""
        where = {"group": str(self.group), "device": str(self.device), **self.size}
        worker, arguments = self.workers[contender.name], {**contender.arguments, **where}
        with self._failures_of(contender.name):
            try:
                worker.make("step", contender.factory, timeout=LONGEST, **arguments)
                with checking:  # a reference in float64 fills the device
                    self._check(contender, beside)
            except WorkerError as error:
                if not beside or not error.raised(torch.OutOfMemoryError):
                    raise
                worker.close()
                return False
        return True

    def _check(self, contender: Contender, beside: int) -> None:
        entry = empty_entry(contender, self.group)
        if contender.role != "floor":
            facts = {**self._ask(contender.name, "memory"), **self._ask(contender.name, "verify")}
            entry = replace(entry, compiled_beside=beside, **facts)
        self.measured.entries[contender.name] = entry

    def time(self) -> None:
        """Interleaved wall time of all contenders whose gradients are right."""
        calls: dict[str, int] = {}
        one_round = 0.0
        for name in list(self.measured.entries):
            with self._failures_of(name):
                step = self._ask(name, "warm_up", self.effort.warm_up)
                calls[name] = max(1, min(self.effort.calls, round(self.effort.turn / step)))
                one_round += (calls[name] + UNTIMED) * step

        def turn(name: str) -> float:
            seconds = math.nan
            with self._failures_of(name):
                seconds = float(self._ask(name, "turn", calls[name]))
            return seconds

        # Contenders that are compared most are neighbours: V1 follows its own counterpart.
        peers = [peer.name for peer in (CLIENT, *reversed(PEERS)) if peer.name in calls]
        order = [*peers, *(name for name in calls if name not in peers)]
        fitting = int(self.effort.total / one_round) if one_round else FEWEST_ROUNDS
        rounds = max(FEWEST_ROUNDS, min(self.effort.rounds, fitting))
        seconds = interleaved({name: partial(turn, name) for name in order}, rounds)
        self.measured.seconds = {n: s for n, s in seconds.items() if n in self.measured.entries}

    def look_closer(self) -> None:
        """What is measured of each contender alone, and whether it learned."""
        for name in list(self.measured.seconds):
            with self._failures_of(name):
                self._look(name)
                self._add(name, self._ask(name, "facts"))
        self._must_learn()
        if self.group.precision == "fp32":
            self._hold()

    def _hold(self) -> None:
        """Bytes of an uncaptured step. It needs as much memory as the contender has, so the
        processes of those before it are ended."""
        for name in list(self.measured.seconds):
            with self._failures_of(name):
                if name != FLOOR.name:
                    self._add(name, self._ask(name, "held"))
                self.workers[name].close()

    def _look(self, name: str) -> None:
        is_step = name != FLOOR.name
        if is_step:
            self._answer(name, "clocks", self.effort.readings)
            self._answer(name, "launched")
        self._answer(name, "used", self.effort.energy)
        if is_step:
            self.measured.losses[name] = self._ask(name, "loss_series")

    def _answer(self, name: str, question: str, *arguments: Any) -> None:
        """Put an answer into the entry; fields that are not known keep their reasons."""
        answer = self._ask(name, question, *arguments)
        before = self.measured.entries[name].unavailable or {}
        unavailable = {**before, **answer.pop("unavailable", {})}
        self._add(name, {**answer, "unavailable": unavailable or None})

    def _add(self, name: str, fields: Mapping[str, Any]) -> None:
        """Put what a worker answered, fields of an entry by name, into the entry."""
        self.measured.entries[name] = replace(self.measured.entries[name], **fields)

    def _must_learn(self) -> None:
        """On the same batches each must learn what the baseline learns, up to rounding; if the
        baseline does not run, what the first peer learns."""
        series = {n: s for n, s in self.measured.losses.items() if n in self.measured.entries}
        base = next((n for n in (BASELINE, *(peer.name for peer in PEERS)) if n in series), None)
        if base is None:
            return
        steps = min(map(len, series.values()))
        drops = {name: _drop(losses[:steps]) for name, losses in series.items()}
        for name, losses in series.items():
            ends = {"first_loss": losses[0], "last_loss": losses[steps - 1], "steps": steps}
            self._add(name, ends)
            if not drops[name] >= LEARNED * drops[base] > 0:
                message = (
                    f"its loss falls by {drops[name]:.3g} where that of {base} falls by "
                    f"{drops[base]:.3g}"
                )
                self._drop(name, WorkerError(f"{message} in {steps} steps: it does not learn"))

    def _ask(self, name: str, method: str, *args: Any) -> Any:
        return self.workers[name].call("step", method, *args)

    @contextlib.contextmanager
    def _failures_of(self, name: str) -> Iterator[None]:
        """Keep the failure of a contender, and measure it no further."""
        try:
            yield
        except WorkerError as error:
            self._drop(name, error)

    def _drop(self, name: str, error: WorkerError) -> None:
        """Its process ends at once: the others need the memory that it holds."""
        self.workers[name].close()
        self.measured.failed.setdefault(name, error)
        self.measured.entries.pop(name, None)
        self.measured.seconds.pop(name, None)


def _drop(losses: list[float]) -> float:
    """How far the loss fell: the mean of the first eight steps minus that of the last eight."""
    return statistics.fmean(losses[:8]) - statistics.fmean(losses[-8:])


def empty_entry(contender: Contender, group: Group) -> StepEntry:
    """The entry of a contender before anything is measured."""
    name = f"step/{group}/{contender.name}"
    return StepEntry(name=name, title=contender.title, **contender.about(group))


def entry_of(contender: Contender, measured: Measured, product_flops: float) -> StepEntry:
    """The entry of a record; see docs/results.md. product_flops: the measured ceiling."""
    name, group = contender.name, measured.group
    reason = measured.cannot.get(name) or str(measured.failed.get(name, ""))
    if reason:
        return replace(empty_entry(contender, group), cannot=reason)
    shape, times = group.shape, measured.seconds[name]
    median = statistics.median(times)
    entry = replace(measured.entries[name], **summary("seconds", times), rounds=len(times))
    if contender.role == "floor":
        return entry
    if contender.role in ("tier", "client"):
        rivals = [rival for rival in measured.seconds if rival != name]
        entry = replace(entry, over={rival: measured.over(rival, name) for rival in rivals})
    if BASELINE in measured.seconds:
        entry = replace(entry, baseline=BASELINE, over_baseline=measured.over(BASELINE, name))
    if FLOOR.name in measured.seconds:
        entry = replace(entry, floor_share=measured.over(FLOOR.name, name))
    flops = shape.model.step_flops(shape.batch_size, shape.seq_len) / median
    return replace(
        entry,
        samples_per_second=shape.batch_size / median,
        tokens_per_second=shape.batch_size * shape.seq_len / median,
        flops_per_second=flops,
        mfu=flops / product_flops,
    )


def bars(
    targets: Iterable[Target], measured: Measured, entries: Mapping[str, StepEntry], device: str
) -> list[Bar]:
    """Judge the targets of a group by its entries (by contender) on a device of that name. A target
    without a measurement is missed, unless a contender cannot run here."""
    judgements = []
    for target, _, _ in covered(targets, entries.values()):
        ratio, why = target.measured(entries), ""
        if ratio is None and (out := {target.who, *target.over} & measured.cannot.keys()):
            why = "; ".join(f"{name}: {measured.cannot[name]}" for name in sorted(map(str, out)))
        untimed = [peer.name for peer in PEERS if peer.name in measured.cannot]
        over_peers = untimed and target.over == (FASTEST_PEER,)
        about = f"without {', '.join(untimed)}: " if over_peers else ""
        judgements.append(judged(target, ratio, device, why, about))
    return judgements
