"""Weak and strong scaling of training steps over the GPUs of this machine.

A job of torchrun for each contender makes its steps (`tinyllama.bench.ranked`) and times them
alternately. Weak scaling gives each GPU the workload's batch, strong scaling gives each its part of
it.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from tinyllama.bench.workloads import LARGE, Group, not_here
from tinyllama.harness.measure.rounds import ratio, summary
from tinyllama.harness.records.entries import Ratio, ScalingEntry

ONE_GPU, WEAK_SCALING, STRONG_SCALING = "one", "weak", "strong"  # the cases of a job
JOB_FILE, RESULT_FILE = "job.json", "result.json"
LONGEST = 400.0  # seconds of a job, compilation included
FIELDS = (  # of an entry, as a rank tells them
    *("plan", "left_out", "live_bytes", "peak_bytes", "graph_bytes"),
    *("collective_seconds", "hidden_seconds", "gradients", "parameters", "last_loss", "steps"),
)


class Job(msgspec.Struct, frozen=True):
    """What the ranks of one contender do. group: a workload and a precision. shards: by FSDP2; no
    GPU holds a whole model then, so gradients are not compared with the float64 reference's.

    reduce_in: the format in which gradients are summed. calls: steps of a turn.
    """

    group: str
    tier: str
    shards: bool = False
    cases: tuple[str, ...] = (ONE_GPU, WEAK_SCALING, STRONG_SCALING)
    reduce_in: str = "fp32"
    calls: int = 4
    rounds: int = 64  # a job's quartiles are 2% apart: 24 gave intervals of 3%

    @property
    def contender(self) -> str:
        """What a record calls it."""
        name = f"{self.tier}-shards" if self.shards else self.tier
        return name if self.reduce_in == "fp32" else f"{name}-{self.reduce_in}-sums"


class JobResult(msgspec.Struct):
    """What a job measured, by case."""

    ranks: int
    seconds: dict[str, list[float]] = {}
    facts: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Scaling:
    """A group of jobs on one workload in one precision."""

    base: Group
    jobs: tuple[Job, ...]
    suffix: str = ""

    def __str__(self) -> str:
        return f"scaling-{self.base}{self.suffix}"


def _tiers(group: str, calls: int) -> tuple[Job, ...]:
    return tuple(Job(group, tier, calls=calls) for tier in ("v2", "v3", "v4"))


def _rounded(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    return tuple(replace(job, cases=(ONE_GPU, WEAK_SCALING), reduce_in="bf16") for job in jobs)


SHARDED = tuple(Job(LARGE, tier, True, (WEAK_SCALING,), calls=2) for tier in ("v3", "v2"))
SMALL, MEDIUM = _tiers("small-bf16", calls=20), _tiers("medium-bf16", calls=4)
SCALINGS = (
    Scaling(Group.parse("small-bf16"), SMALL),
    Scaling(Group.parse("medium-bf16"), MEDIUM),
    Scaling(Group.parse("medium-bf16"), _rounded(MEDIUM), "-rounded"),
    Scaling(Group.parse(LARGE), SHARDED),
)


def cannot(scaling: Scaling, device: torch.device) -> str | None:
    """Why it is not measured on the machine of a device; None when it is."""
    if reason := not_here(scaling.base, device):
        return reason
    count = torch.cuda.device_count() if device.type != "cpu" else 0
    return None if count > 1 else f"scaling needs two GPUs, and there are {count}"


def groups(device: torch.device) -> list[str]:
    """Those that this machine measures."""
    return [str(scaling) for scaling in SCALINGS if cannot(scaling, device) is None]


def measure(scaling: Scaling, ranks: int) -> list[ScalingEntry]:
    """The entries of every contender. Raises RuntimeError with the end of the log of a job that
    fails or takes too long."""
    return [entry for job in scaling.jobs for entry in entries_of(job, launch(job, ranks))]


def launch(job: Job, ranks: int, seconds: float = LONGEST) -> JobResult:
    """Run a job with torchrun."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / JOB_FILE).write_bytes(msgspec.json.encode(job))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        call = [sys.executable, *command, "-m", "tinyllama.bench.ranked", name]
        try:
            ended = subprocess.run(
                call, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{job.group} on {ranks} ranks took {seconds:.0f} s") from error
        if ended.returncode:
            log = (ended.stdout + ended.stderr)[-4000:]
            raise RuntimeError(
                f"{job.group} on {ranks} ranks ended with {ended.returncode}:\n{log}"
            )
        return msgspec.json.decode((folder / RESULT_FILE).read_bytes(), type=JobResult)


def entries_of(job: Job, result: JobResult) -> list[ScalingEntry]:
    """What a record holds of a job."""
    return [_entry(job, result, case) for case in result.facts]


def _entry(job: Job, result: JobResult, case: str) -> ScalingEntry:
    facts, seconds = result.facts[case], result.seconds[case]
    ranks = 1 if case == ONE_GPU else result.ranks
    efficiency: Ratio | None = None
    if case != ONE_GPU and ONE_GPU in result.seconds:
        over_one: Sequence[float] = ratio(result.seconds[ONE_GPU], seconds)
        shared_by = ranks if case == STRONG_SCALING else 1
        efficiency = Ratio(*(value / shared_by for value in over_one))
    group = Group.parse(job.group)
    return ScalingEntry(
        name=f"scaling/{group}/{job.contender}/{case}",
        **vars(group),
        contender=job.contender,
        role="tier",
        case=case,
        ranks=ranks,
        batch_size=facts["batch"],
        **{field: facts[field] for field in FIELDS if field in facts},
        **summary("seconds", seconds),
        rounds=len(seconds),
        efficiency=efficiency,
        samples_per_second=facts["batch"] / statistics.median(seconds),
    )
