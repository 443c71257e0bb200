"""Measure a group: every contender in a worker of its own, and all of them alternately.

The order matters. Contenders are made at the same time, since compiling leaves the device idle;
after that only one works at a time. Memory is read before anything but a step has run, and
gradients are checked before any time is taken. Then all contenders are timed alternately. What
disturbs the device (profiler, energy) comes after that. What needs the memory of other contenders
comes last.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace as with_fields
from threading import Lock
from typing import Any

import torch
from msgspec.structs import replace

from tinyllama.bench.contender import Contender
from tinyllama.bench.contest import Contest
from tinyllama.bench.peers import CLIENT, PEERS
from tinyllama.bench.steps import UNTIMED
from tinyllama.bench.workloads import ALL, Group, at_once
from tinyllama.harness.machine.worker import WorkerError, close_all
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, Ratio, ratio, summary
from tinyllama.harness.records.entries import StepEntry
from tinyllama.harness.records.targets import FASTEST_PEER, Bar, Target, covered, judged
from tinyllama.model.tiers import TIERS, V1, Tier

FLOOR = Contender(
    "floor", "products, attention, AdamW alone", "floor", "tinyllama.bench.floor:Floor", alone=True
)
BASELINE = V1.name  # over which every step's ratio is
LONGEST = 400.0  # seconds until a contender must be ready; a group should take less than 10 min
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
CONTENDERS = (
    *map(_tier, TIERS.values()),
    SINGLE,
    _tier(TIERS["v3"], "small memory", memory="small"),  # V4 has V3's blocks then
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
    energy: float

    @staticmethod
    def on(device: torch.device) -> "Effort":
        if device.type == "cpu":
            return Effort(warm_up=0.3, turn=0.03, calls=25, rounds=15, total=20, energy=0)
        return Effort(warm_up=1.0, turn=0.1, calls=25, rounds=40, total=150, energy=1.5)

    def short(self) -> "Effort":
        """For a short run: rounds of fewer steps."""
        return with_fields(self, warm_up=0.5, turn=0.05, calls=12, rounds=60, total=20, energy=1.0)


class StepGroup(Contest):
    """A group of training steps, and what was measured of each contender.

    seconds: of each round. entries: without the fields that are computed from these. losses: of
    each step. size: ``batch_size`` and ``seq_len`` other than the workload's.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        short: bool = False,
        size: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__("step")
        self.group, self.device, self.short = group, device, short
        self.arguments = {"group": str(group), "device": str(device), **(size or {})}
        self.effort = Effort.on(device).short() if short else Effort.on(device)
        self.seconds: dict[str, list[float]] = {}
        self.entries: dict[str, StepEntry] = {}
        self.losses: dict[str, list[float]] = {}
        self._checking = Lock()

    def __enter__(self) -> "StepGroup":
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self.workers.values())

    def drop(self, name: str, error: WorkerError) -> None:
        super().drop(name, error)
        self.entries.pop(name, None)
        self.seconds.pop(name, None)

    def over(self, slow: str, fast: str) -> Ratio:
        """How many times longer one contender takes than another."""
        return ratio(self.seconds[slow], self.seconds[fast])

    def prepare(self, contenders: Sequence[Contender]) -> None:
        """Make the contenders that can be measured here at the same time, and check each when it is
        ready. One that lacks memory that others need only to be made is made again alone."""
        able = [contender for contender in contenders if self._able(contender)]
        for contender in able:
            self.workers[contender.name] = contender.worker()
        most = at_once(self.group, self.short)
        together = [contender for contender in able if most > 1 and not contender.alone]
        with ThreadPoolExecutor(most) as pool:
            ready = list(pool.map(self._make, together))
        again = [contender for contender, done in zip(together, ready, strict=True) if not done]
        for contender in again:
            self.workers[contender.name] = contender.worker()
        for contender in (*again, *(c for c in able if c not in together)):
            self._make(contender, alone=True)
        names = [contender.name for contender in able if contender.name in self.entries]
        self.entries = {name: self.entries[name] for name in names}
        self.workers = {name: self.workers[name] for name in names}

    def _able(self, contender: Contender) -> bool:
        left_out = self.short and contender.name not in SHORT[self.group.workload]
        reason = NOT_SHORT if left_out else contender.cannot(self.device, str(self.group))
        if reason:
            self.cannot[contender.name] = reason
        return not reason

    def _make(self, contender: Contender, alone: bool = False) -> bool:
        """Make and check a contender. Returns whether it need not be made again, alone."""
        name, worker = contender.name, self.workers[contender.name]
        arguments = {**contender.arguments, **self.arguments}
        with self.failing(name):
            try:
                worker.make(self.key, contender.factory, timeout=LONGEST, **arguments)
                entry = empty_entry(contender, self.group)
                if contender.role != "floor":
                    with self._checking:  # a reference in float64 fills the device
                        facts = {**self.ask(name, "memory"), **self.ask(name, "verify")}
                    entry = replace(entry, **facts)
                self.entries[name] = entry
            except WorkerError as error:
                if alone or not error.raised(torch.OutOfMemoryError):
                    raise
                worker.close()
                return False
        return True

    def time(self) -> None:
        """Interleaved wall time of all contenders whose gradients are right."""
        steps = self.ask_all("warm_up", self.effort.warm_up)
        calls = {
            name: max(1, min(self.effort.calls, round(self.effort.turn / step)))
            for name, step in steps.items()
        }
        one_round = sum((calls[name] + UNTIMED) * step for name, step in steps.items())
        fitting = int(self.effort.total / one_round) if one_round else FEWEST_ROUNDS
        rounds = max(FEWEST_ROUNDS, min(self.effort.rounds, fitting))
        # Contenders that are compared most are neighbours: V1 follows its own counterpart.
        peers = [peer.name for peer in (CLIENT, *reversed(PEERS)) if peer.name in calls]
        order = [*peers, *(name for name in calls if name not in peers)]
        self.seconds = self.rounds("turn", rounds, {name: (calls[name],) for name in order})

    def look_closer(self) -> None:
        """What is measured of each contender alone, and whether it learned."""
        steps = [name for name in self.workers if name != FLOOR.name]
        for name in list(self.workers):
            with self.failing(name):
                if name in steps:
                    self._add(name, self.ask(name, "launched"))
                self._add(name, self.ask(name, "used", self.effort.energy))
                if name in steps:
                    self.losses[name] = self.ask(name, "loss_series")
                self._add(name, self.ask(name, "facts"))
        self._must_learn()
        if self.group.precision == "fp32":
            self._hold()

    def _hold(self) -> None:
        """Bytes of an uncaptured step. It needs as much memory as the contender has, so the
        processes of those before it are ended."""
        for name in list(self.workers):
            with self.failing(name):
                if name != FLOOR.name:
                    self._add(name, self.ask(name, "uncaptured_memory"))
                self.workers[name].close()

    def _add(self, name: str, answer: Mapping[str, Any]) -> None:
        """Put an answer, fields of an entry by name, into the entry; fields that are not known keep
        their reasons."""
        entry = self.entries[name]
        unavailable = {**(entry.unavailable or {}), **answer.get("unavailable", {})}
        self.entries[name] = replace(entry, **{**answer, "unavailable": unavailable or None})

    def _must_learn(self) -> None:
        """On the same batches each must learn what the baseline learns, up to rounding; if the
        baseline does not run, what the first peer learns."""
        series = {name: losses for name, losses in self.losses.items() if name in self.workers}
        base = next((n for n in (BASELINE, *(peer.name for peer in PEERS)) if n in series), None)
        if base is None:
            return
        steps = min(map(len, series.values()))
        drops = {name: _drop(losses[:steps]) for name, losses in series.items()}
        for name in series:
            if not drops[name] >= LEARNED * drops[base] > 0:
                message = (
                    f"its loss falls by {drops[name]:.3g} where that of {base} falls by "
                    f"{drops[base]:.3g}"
                )
                self.drop(name, WorkerError(f"{message} in {steps} steps: it does not learn"))


def measure(
    group: Group,
    device: torch.device,
    contenders: Sequence[Contender] = CONTENDERS,
    *,
    short: bool = False,
) -> StepGroup:
    """Measure a group. The failure of a contender is kept with its name. short: see `SHORT`."""
    with StepGroup(group, device, short=short) as steps:
        steps.prepare(contenders)
        steps.time()
        steps.look_closer()
    return steps


def _drop(losses: list[float]) -> float:
    """How far the loss fell: the mean of the first eight steps minus that of the last eight."""
    return statistics.fmean(losses[:8]) - statistics.fmean(losses[-8:])


def empty_entry(contender: Contender, group: Group) -> StepEntry:
    """The entry of a contender before anything is measured."""
    name = f"step/{group}/{contender.name}"
    return StepEntry(name=name, title=contender.title, **contender.about(group))


def entry_of(contender: Contender, measured: StepGroup, product_flops: float) -> StepEntry:
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
        mfu=flops / product_flops,
    )


def bars(
    targets: Iterable[Target], measured: StepGroup, entries: Mapping[str, StepEntry], device: str
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
