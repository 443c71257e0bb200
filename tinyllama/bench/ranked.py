"""What each rank of a scaling job does: training steps on one GPU and on all, timed alternately.

    torchrun --nproc-per-node N -m tinyllama.bench.ranked FOLDER

FOLDER/job.json is a `Job`; rank 0 writes FOLDER/found.json. Steps of one GPU run on all GPUs at the
same time, so that both sides of a ratio have the power and the clocks of a busy host. A reading is
that of the slowest rank. Gradients are compared with the float64 reference of the whole batch.
"""

import functools
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tinyllama.bench.scaling import ONE, WEAK, Found, Job, Part
from tinyllama.bench.steps import BATCHES, UNTIMED, StepContender
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.clock import wall_seconds
from tinyllama.harness.measure.memory import forget_peak, live_bytes
from tinyllama.harness.measure.overlap import overlap
from tinyllama.harness.measure.rounds import interleaved
from tinyllama.model.config import ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import resolve
from tinyllama.training.ranks import ALONE, Ranks, device_of, joined, launched
from tinyllama.training.shards import local, shard, whole
from tinyllama.training.step import TrainStep


@functools.cache
def _drawn(shape: ModelConfig, seed: int) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in TinyLlama(shape, seed=seed).parameters()]


class _Model(TinyLlama):
    """Its weights are drawn once in a process, which takes seconds."""

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        for parameter, drawn in zip(self.parameters(), _drawn(self.config, seed), strict=True):
            parameter.copy_(drawn)


class RankedStep(StepContender):
    """A tier's step on some ranks, of which `StepContender` sees the whole batch and whole
    gradients."""

    def __init__(self, part: Part, ranks: Ranks, layers: int | None, **where: Any) -> None:
        super().__init__(**where)
        if layers is not None:
            self.shape = replace(self.shape, num_layers=layers)
        self.model = _Model(self.shape, resolve(part.tier).without(*part.without))
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


class Bench:
    """A job on this rank."""

    def __init__(self, job: Job, folder: Path, ranks: Ranks, device: torch.device) -> None:
        self.job, self.folder, self.ranks, self.device = job, folder, ranks, device
        self.steps: dict[str, RankedStep] = {}
        self.found = Found(link=0.0, ranks=ranks.count)

    def run(self) -> Found:
        """Prepare, verify and time. All ranks call it together."""
        job = self.job
        for case in job.cases:
            self._make(case)
        self.found.link = link_rate(self.ranks, self.device)
        for step in self.steps.values():
            for _ in range(UNTIMED):
                step.next()
        if job.rounds:
            turns = {
                c: partial(_turn, step, job.calls, self.ranks) for c, step in self.steps.items()
            }
            self.found.seconds = interleaved(turns, job.rounds)
        say(self.ranks, "timed")
        self._write()
        for case, step in self.steps.items():
            facts = self.found.facts[case]
            if self.device.type != "cpu" and case != ONE:
                facts |= self._overlap(case, step, job.trace)
            losses = step.loss_series()
            facts |= {"losses": losses[:BATCHES], "last_loss": losses[-1], "steps": len(losses)}
        self._write()
        return self.found

    def _make(self, case: str) -> None:
        """Prepare and verify a case."""
        job = self.job
        if job.part.shards and case == ONE:
            return  # one rank has nothing to shard
        say(self.ranks, f"{job.part.contender}, {case}: preparing")
        before = live_bytes(self.device, ()) if self.device.type != "cpu" else 0
        which = ALONE if case == ONE else self.ranks
        size = Group.parse(job.group).shape.batch_size * (self.ranks.count if case == WEAK else 1)
        where = {"group": job.group, "device": str(self.device), "batch_size": size}
        self.steps[case] = step = RankedStep(job.part, which, job.layers, **where)
        facts = {**step.facts(), **memory(step, before), "batch": step.config.batch_size}
        if job.verify:
            facts |= step.verify()
        self.found.facts[case] = facts

    def _write(self) -> None:
        if self.ranks.first:
            self.found.write(self.folder)

    def _overlap(self, case: str, step: RankedStep, trace: bool) -> dict[str, float]:
        path = self.folder / f"{case}.trace.json" if trace else None
        overlapped = overlap(step.next, self.device, path if self.ranks.first else None)
        each = self.ranks.gathered((overlapped.collective, overlapped.hidden))
        return {
            "collective_seconds": statistics.mean(c for c, _ in each),
            "hidden_seconds": statistics.mean(h for _, h in each),
        }


def memory(step: RankedStep, before: int) -> dict[str, int]:
    """Bytes of a step on this rank, without those that other steps held before."""
    counted = ("live_bytes", "peak_bytes")
    return {k: v - before if k in counted else v for k, v in step.memory().items()}


def _turn(step: RankedStep, calls: int, ranks: Ranks) -> float:
    """The seconds of a step on the slowest rank; all start together."""
    for _ in range(UNTIMED):
        step.next()
    synchronize(step.device)
    dist.barrier()
    times = [wall_seconds(step.next, step.queue) for _ in range(calls)]
    return max(ranks.gathered(statistics.median(times)))


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
        Bench(Job.read(folder / "job.json"), folder, ranks, device).run()
    say(ranks, "left")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
