"""What each rank of a scaling job does: training steps on one GPU and on all, timed alternately.

    torchrun --nproc-per-node N -m tinyllama.bench.ranked FOLDER

FOLDER/job.json is a `Job`; rank 0 writes FOLDER/found.json. Steps of one GPU run on all GPUs at the
same time, so that both sides of a ratio have the power and the clocks of a busy host. A reading is
that of the slowest rank. Gradients are compared with the float64 reference of the whole batch.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tinyllama.bench.steps import BATCHES, UNTIMED, StepContender
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.clock import wall_seconds
from tinyllama.harness.measure.memory import forget_peak
from tinyllama.harness.measure.overlap import overlap
from tinyllama.harness.measure.rounds import interleaved
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import resolve
from tinyllama.training.ranks import ALONE, Ranks, device_of, joined, launched
from tinyllama.training.shards import local, shard, whole
from tinyllama.training.step import TrainStep

ONE, WEAK, STRONG = "one", "weak", "strong"
WAIT = 0.05  # seconds between two looks for a file


@dataclass(frozen=True)
class Part:
    """A contender of a job: a tier; ``shards``: FSDP2; ``without``: its parts switched off."""

    tier: str
    shards: bool = False
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        off = f"-no-{'-'.join(self.without)}" if self.without else ""
        return f"{self.tier}{off}" + ("-shards" if self.shards else "")


@dataclass(frozen=True)
class Job:
    """group: a workload and a precision. cases: of `ONE`, `WEAK`, `STRONG`.

    calls: steps of a turn. layers: of the model, if not the workload's. verify: compare gradients.
    go: a file that is waited for between the preparation and the timing; None: no wait.
    """

    group: str
    parts: Sequence[Part]
    cases: Sequence[str] = (ONE, WEAK, STRONG)
    rounds: int = 10
    calls: int = 4
    layers: int | None = None
    verify: bool = True
    go: str | None = None
    trace: bool = False

    @staticmethod
    def read(path: Path) -> Job:
        data = json.loads(path.read_text())
        parts = [Part(**{**part, "without": tuple(part["without"])}) for part in data["parts"]]
        return Job(**{**data, "parts": parts})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class RankedStep(StepContender):
    """A tier's step on some ranks, of which `StepContender` sees the whole batch and whole
    gradients."""

    def __init__(self, part: Part, ranks: Ranks, layers: int | None, **where: Any) -> None:
        super().__init__(**where)
        if layers is not None:
            self.shape = replace(self.shape, num_layers=layers)
        self.model = TinyLlama(self.shape, resolve(part.tier).without(*part.without))
        if part.shards:
            shard(self.model, self.config, self.device, ranks)
        else:
            self.model.to(self.device)
        self.training = TrainStep(self.model, self.config, None, ranks)
        self.training.prepare(capture=False)
        if self.training.plan.capture:
            forget_peak(self.device)
            self.training.prepare(warm_up=0)
        self.graphs = self.training.graphs
        self.plan, self.left_out = str(self.training.plan), self.training.left_out
        self.parameters = dict(self.model.named_parameters())
        mine = ranks.part(self.config.batch_size)
        self.step = lambda batch: self.training(batch[mine])
        self.started()

    def weight_of(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        return whole(local(parameter), parameter).detach()

    def gradient_of(self, name: str) -> torch.Tensor | None:
        parameter = self.parameters[name]
        gradient = parameter.grad
        return None if gradient is None else whole(local(gradient), parameter)


@dataclass
class Found:
    """What a job found, by the name of part and case; ``link``: bytes a second that each GPU
    sends in an all-reduce."""

    link: float
    ranks: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


def run(job: Job, folder: Path, ranks: Ranks, device: torch.device) -> Found:
    """Prepare, verify, wait for the file ``job.go``, and time."""
    cases: dict[str, RankedStep] = {}
    facts: dict[str, dict[str, Any]] = {}
    for part in job.parts:
        for case in job.cases:
            if part.shards and case == ONE:
                continue  # one rank has nothing to shard
            name = f"{part}/{case}"
            say(ranks, f"{name}: preparing")
            step = _made(job, part, case, ranks, device)
            cases[name] = step
            facts[name] = {**step.facts(), **step.memory(), "batch": step.config.batch_size}
            if job.verify and case != STRONG:
                facts[name] |= step.verify()
    (folder / f"ready.{ranks.rank}").touch()
    while job.go is not None and not Path(job.go).exists():
        time.sleep(WAIT)
    found = Found(link=link_rate(ranks, device), ranks=ranks.count, facts=facts)
    for step in cases.values():
        for _ in range(UNTIMED):
            step.next()
    turns = {name: _turn(step, job.calls, ranks) for name, step in cases.items()}
    found.seconds = interleaved(turns, job.rounds) if job.rounds else {}
    say(ranks, "timed")
    for name, step in cases.items():
        if device.type != "cpu" and not name.endswith(ONE):
            trace = folder / f"{name.replace('/', '-')}.trace.json" if job.trace else None
            seen = overlap(step.next, device, trace if ranks.first else None)
            each = ranks.gathered((seen.collective, seen.hidden))
            facts[name]["collective_seconds"] = statistics.mean(c for c, _ in each)
            facts[name]["hidden_seconds"] = statistics.mean(h for _, h in each)
        losses = step.loss_series()
        facts[name] |= {"losses": losses[:BATCHES], "last_loss": losses[-1], "steps": len(losses)}
    return found


def _made(job: Job, part: Part, case: str, ranks: Ranks, device: torch.device) -> RankedStep:
    which = ALONE if case == ONE else ranks
    size = Group.parse(job.group).shape.batch_size * (ranks.count if case == WEAK else 1)
    where = {"group": job.group, "device": str(device), "batch_size": size}
    return RankedStep(part, which, job.layers, **where)


def _turn(step: RankedStep, calls: int, ranks: Ranks) -> Callable[[], float]:
    """The seconds of a step on the slowest rank; all start together."""

    def turn() -> float:
        for _ in range(UNTIMED):
            step.next()
        synchronize(step.device)
        dist.barrier()
        times = [wall_seconds(step.next, step.queue) for _ in range(calls)]
        return max(ranks.gathered(statistics.median(times)))

    return turn


def link_rate(ranks: Ranks, device: torch.device, size: int = 2**28) -> float:
    """Bytes that each rank sends in a second of an all-reduce of so many bytes: a ring sends
    2 (n - 1) / n of them. The least time of ten counts, as of every ceiling."""
    size //= 16 if device.type == "cpu" else 1
    data = torch.zeros(size // 4, device=device)
    for _ in range(3):
        dist.all_reduce(data)
    synchronize(device)
    times = []
    for _ in range(10):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(data)
        synchronize(device)
        times.append(max(ranks.gathered(time.perf_counter() - start)))
    return 2 * (ranks.count - 1) / ranks.count * size / min(times)


def say(ranks: Ranks, text: str) -> None:
    if ranks.first:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(folder: Path) -> None:
    ranks = launched()
    device = device_of(ranks, None)
    with joined(ranks, device):
        found = run(Job.read(folder / "job.json"), folder, ranks, device)
        if ranks.first:
            (folder / "found.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
