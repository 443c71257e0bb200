"""Weak and strong scaling of training steps over the GPUs of this machine.

A job of torchrun for each contender makes its steps (`tinyllama.bench.ranked`) and times them
alternately. Weak scaling gives each GPU the workload's batch, strong scaling gives each its part of
it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinyllama.bench.workloads import LARGE, Group, not_here
from tinyllama.harness.machine.files import write_json
from tinyllama.harness.measure.rounds import ratio, summary
from tinyllama.harness.records.entries import Ratio, ScalingEntry

ONE, WEAK, STRONG = "one", "weak", "strong"
FOUND = "found.json"
LONGEST = 400.0  # seconds of a job, compilation included


@dataclass(frozen=True)
class Part:
    """A contender: a tier; ``shards``: FSDP2; ``without``: its parts switched off."""

    tier: str
    shards: bool = False
    without: tuple[str, ...] = ()

    @property
    def contender(self) -> str:
        """What a record calls it."""
        off = "-no-" + "-".join(self.without) if self.without else ""
        return self.tier + off + ("-shards" if self.shards else "")


@dataclass(frozen=True)
class Job:
    """group: a workload and a precision. cases: of `ONE`, `WEAK`, `STRONG`.

    calls: steps of a turn. layers: of the model, if not the workload's. verify: compare gradients
    with the float64 reference's, of which one GPU holds a whole model.
    """

    group: str
    part: Part
    cases: Sequence[str] = (ONE, WEAK, STRONG)
    rounds: int = 64  # a job's quartiles are 2% apart: 24 gave intervals of 3%
    calls: int = 4
    layers: int | None = None
    verify: bool = True
    trace: bool = False

    @staticmethod
    def read(path: Path) -> "Job":
        data = json.loads(path.read_text())
        part = {**data["part"], "without": tuple(data["part"]["without"])}
        return Job(**{**data, "part": Part(**part), "cases": tuple(data["cases"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass
class Found:
    """What a job measured, by case; ``link``: bytes a second that each GPU sends in an
    all-reduce."""

    link: float
    ranks: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        write_json(folder / FOUND, asdict(self))

    @staticmethod
    def read(folder: Path) -> "Found":
        return Found(**json.loads((folder / FOUND).read_text()))


@dataclass(frozen=True)
class Scaling:
    """The contenders of a group."""

    base: Group
    parts: tuple[Part, ...]
    cases: tuple[str, ...] = (ONE, WEAK, STRONG)
    calls: int = 4

    def __str__(self) -> str:
        return f"scaling-{self.base}"


TIERS = tuple(Part(tier) for tier in ("v2", "v3", "v4"))
SCALINGS = (
    Scaling(Group("small", "bf16"), TIERS, calls=20),
    Scaling(Group("medium", "bf16"), TIERS),
    Scaling(
        Group.parse(LARGE), (Part("v3", shards=True), Part("v2", shards=True)), (WEAK,), calls=2
    ),
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
    entries: list[ScalingEntry] = []
    for job in jobs_of(scaling):
        entries += entries_of(job, launch(job, ranks))
    return entries


def jobs_of(scaling: Scaling) -> list[Job]:
    group, cases, calls = str(scaling.base), scaling.cases, scaling.calls
    return [Job(group, part, cases, calls=calls, verify=not part.shards) for part in scaling.parts]


def launch(job: Job, ranks: int, seconds: float = LONGEST) -> Found:
    """Run a job with torchrun."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.write(folder / "job.json")
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
        return Found.read(folder)


def entries_of(job: Job, measured: Found) -> list[ScalingEntry]:
    """What a record keeps of a job."""
    return [_entry(job, measured, case) for case in measured.facts]


def _entry(job: Job, measured: Found, case: str) -> ScalingEntry:
    facts, seconds, contender = measured.facts[case], measured.seconds[case], job.part.contender
    ranks = 1 if case == ONE else measured.ranks
    over: Ratio | None = None
    if case != ONE and ONE in measured.seconds:
        over = ratio(measured.seconds[ONE], seconds)
        if case == STRONG:
            over = Ratio(*(value / ranks for value in over))
    group = Group.parse(job.group)
    fields = {key: facts[key] for key in KEPT if key in facts}
    return ScalingEntry(
        name=f"scaling/{group}/{contender}/{case}",
        **vars(group),
        contender=contender,
        role="tier",
        case=case,
        ranks=ranks,
        batch_size=facts["batch"],
        **fields,
        **summary("seconds", seconds),
        rounds=len(seconds),
        efficiency=over,
        samples_per_second=facts["batch"] / statistics.median(seconds),
        link_bytes_per_second=None if case == ONE else measured.link,
    )


KEPT = (
    *("plan", "left_out", "live_bytes", "peak_bytes", "graph_bytes"),
    *("collective_seconds", "hidden_seconds", "gradients", "parameters", "last_loss", "steps"),
)
