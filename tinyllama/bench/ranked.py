"""What each rank of a scaling job does: training steps on one GPU and on all, timed alternately.

    torchrun --nproc-per-node N -m tinyllama.bench.ranked FOLDER

FOLDER/job.json is a `Job`; rank 0 writes FOLDER/result.json. Steps of one GPU run on all GPUs at
the same time, so that both sides of a ratio have the power and the clocks of a busy host. A reading
is that of the slowest rank. Gradients are compared with the float64 reference of the whole batch.
"""

import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tinyllama.bench.scaling import JOB_FILE, ONE_GPU, RESULT_FILE, WEAK_SCALING, Job, JobResult
from tinyllama.bench.steps import BATCHES, UNTIMED, OurStep
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.measure.clock import wall_seconds
from tinyllama.harness.measure.memory import live_bytes
from tinyllama.harness.measure.overlap import overlap
from tinyllama.harness.measure.rounds import interleaved
from tinyllama.model.llama import TinyLlama
from tinyllama.training.ranks import ALONE, Ranks, device_of, joined, launched
from tinyllama.training.shards import full_tensor, local, shard
from tinyllama.training.step import TrainStep


class RankedStep(OurStep):
    """A tier's step on some ranks, of which `StepContender` sees the whole batch and whole
    gradients."""

    def __init__(self, job: Job, ranks: Ranks, **where: Any) -> None:
        super().__init__(**where)
        self.config = replace(self.config, reduce_in=job.reduce_in)
        model = TinyLlama(self.shape, job.tier)
        if job.shards:
            shard(model, self.config, self.device, ranks)
        else:
            model.to(self.device)
        self.run_by(TrainStep(model, self.config, None, ranks))
        part = ranks.part(self.config.batch_size)
        self.step = lambda batch: self.training(batch[part])
        self.started()

    def weight_of(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        return full_tensor(local(parameter), parameter).detach()

    def gradient_of(self, name: str) -> torch.Tensor | None:
        parameter = self.parameters[name]
        gradient = parameter.grad
        return None if gradient is None else full_tensor(local(gradient), parameter)


def run(job: Job, ranks: Ranks, device: torch.device) -> JobResult:
    """Prepare, verify and time the cases of a job. All ranks call it together."""
    steps: dict[str, RankedStep] = {}
    result = JobResult(ranks=ranks.count)
    for case in job.cases:
        if not (job.shards and case == ONE_GPU):  # one rank has nothing to shard
            steps[case], result.facts[case] = _prepared(job, case, ranks, device)
    turns = {case: partial(_turn, step, job.calls, ranks) for case, step in steps.items()}
    result.seconds = interleaved(turns, job.rounds)
    for case, step in steps.items():
        facts = result.facts[case]
        if device.type != "cpu" and case != ONE_GPU:
            facts |= _overlap(step, ranks)
        losses = step.loss_series()
        facts |= {"losses": losses[:BATCHES], "last_loss": losses[-1], "steps": len(losses)}
    return result


def _prepared(
    job: Job, case: str, ranks: Ranks, device: torch.device
) -> tuple[RankedStep, dict[str, Any]]:
    """The step of a case, verified unless it is in shards; what is known of it before it is
    timed. Its bytes are those on this rank, without what other steps took before."""
    before = live_bytes(device, ()) if device.type != "cpu" else 0
    size = Group.parse(job.group).shape.batch_size * (ranks.count if case == WEAK_SCALING else 1)
    which = ALONE if case == ONE_GPU else ranks
    where: dict[str, Any] = {"group": job.group, "device": str(device), "batch_size": size}
    step = RankedStep(job, which, **where)
    memory = step.memory()
    for name in ("live_bytes", "peak_bytes"):
        if name in memory:
            memory[name] -= before
    facts = {**step.facts(), **memory, "batch": step.config.batch_size}
    if not job.shards:
        facts |= step.verify()
    for _ in range(UNTIMED):
        step.next()
    return step, facts


def _overlap(step: RankedStep, ranks: Ranks) -> dict[str, float]:
    """Seconds of collectives, and of these what other kernels hide: the means over the ranks."""
    overlapped = overlap(step.next, step.device, None)
    pairs = ranks.gathered((overlapped.collective, overlapped.hidden))
    return {
        "collective_seconds": statistics.mean(collective for collective, _ in pairs),
        "hidden_seconds": statistics.mean(hidden for _, hidden in pairs),
    }


def _turn(step: RankedStep, calls: int, ranks: Ranks) -> float:
    """The seconds of a step on the slowest rank; all start together."""
    for _ in range(UNTIMED):
        step.next()
    synchronize(step.device)
    dist.barrier()
    times = [wall_seconds(step.next, step.queue) for _ in range(calls)]
    return max(ranks.gathered(statistics.median(times)))


def main(folder: Path) -> None:
    ranks = launched()
    device = device_of(ranks, None)
    job = msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=Job)
    with joined(ranks, device):
        result = run(job, ranks, device)
    if ranks.first:
        (folder / RESULT_FILE).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
