"""Run stages, all timed alternately in processes of their own, and write what was measured."""

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyllama.bench.steps import UNTIMED
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.files import replace_text
from tinyllama.harness.machine.worker import Worker, workers
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, interleaved, ratio
from tinyllama.harness.records.results import current_commit, now, short, versions
from tinyllama.harness.report.tables import aligned, markdown_table
from tinyllama.workshop.contender import Observations
from tinyllama.workshop.stages import STAGES, Parts, Stage

COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")
TURN = {"cpu": 0.05, "cuda": 0.2}  # seconds of a turn; at least one step
ORDER = (("2", "3"), ("4", "5"), ("v1", "5"))  # the first is slower
NONE = dict.fromkeys(("check", "issue", "lesson", "fix"), "")
BASELINE = Stage(0, "V1", Parts(), **NONE, speed="372.9", memory="522.3 MB")  # published figures


@dataclass
class Measured:
    """What was measured of a stage, of which number 0 is the baseline, V1. seconds, reported: of a
    step in each round, by a clock that waits and by the stage's own. memory: bytes, by what they
    are. observations: None of the baseline."""

    stage: Stage
    first_loss: float
    memory: Mapping[str, int]
    seconds: list[float] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)
    observations: Observations | None = None

    @property
    def name(self) -> str:
        return str(self.stage.number or "v1")

    @property
    def time(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def as_promised(self) -> bool:
        """Whether the check was red with the fault, and green without; one that cannot be made on
        this device says so in the report."""
        expected = {"as it is": "failed" if self.stage.fault else "passed", "fixed": "passed"}
        verdicts = self.observations.verdicts if self.observations else {}
        return all(
            outcome in ("unsupported", expected[which]) for which, (outcome, _) in verdicts.items()
        )


def group_for(device: torch.device) -> Group:
    """The published workload; on a CPU the tiny one."""
    return Group("tiny" if device.type == "cpu" else "small", "fp32")


def run(
    numbers: Sequence[int], device: torch.device, say: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """The baseline and the stages with these numbers. Raises WorkerError for one that fails."""
    where: dict[str, Any] = {"group": str(group_for(device)), "device": str(device)}
    factory = "tinyllama.workshop.contender:StageStep"
    with workers() as started:
        for name in ("v1", *map(str, numbers)):
            started[name] = Worker(name, preload=[factory.partition(":")[0]])
        say(f"preparing v1 and {len(numbers)} stages")
        started["v1"].make("step", "tinyllama.bench.steps:TierStep", tier="v1", **where)
        for number in numbers:
            started[str(number)].make("step", factory, number=number, **where)
        stages = []
        for stage in (BASELINE, *(STAGES[number] for number in numbers)):
            call = partial(started[str(stage.number or "v1")].call, "step")
            memory = call("memory")  # the first of all: only steps may precede it
            stages.append(Measured(stage, call("loss_series")[0], memory))
        say(f"timing them alternately, {FEWEST_ROUNDS} rounds")
        _time(started, stages, device)
        for measured in stages[1:]:
            say(f"stage {measured.name}: its check, broken and fixed")
            measured.observations = started[measured.name].call("step", "observations")
        return stages


def _time(started: Mapping[str, Worker], stages: Sequence[Measured], device: torch.device) -> None:
    turns: dict[str, Callable[[], float]] = {}
    for measured in stages:
        call = partial(started[measured.name].call, "step")
        calls = max(1, min(20, round(TURN[device.type] / call("warm_up", 0.2)) - UNTIMED))
        turns[measured.name] = partial(call, "turn", calls)
        if not measured.stage.parts.waits:
            turns[f"{measured.name} reported"] = partial(call, "reported", calls)
    seconds = interleaved(turns, FEWEST_ROUNDS)
    for measured in stages:
        measured.seconds = seconds[measured.name]
        measured.reported = seconds.get(f"{measured.name} reported", measured.seconds)


# -- what is written --------------------------------------------------------------------------


def profile_csv(kernels: Mapping[str, tuple[int, float]]) -> str:
    """The kernels of a step, the slowest first, in the columns of `rocprof --stats`. A name's
    commas become semicolons, so that `sort -t,` finds its column."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\")
    rows.writerow(COLUMNS)
    total = sum(seconds for _, seconds in kernels.values()) or 1.0
    ordered = sorted(kernels.items(), key=lambda item: (-item[1][1], item[0]))
    for name, (calls, seconds) in ordered:
        without_commas = name.translate(str.maketrans(',"\n\r\\', ";'  /"))
        nanoseconds = round(seconds * 1e9)
        average = f"{nanoseconds / max(1, calls):.0f}"
        share = f"{100 * seconds / total:.2f}"
        rows.writerow((without_commas, calls, nanoseconds, average, share))
    return text.getvalue()


def speed(seconds: Sequence[float], device: torch.device) -> str:
    """Samples a second."""
    return f"{group_for(device).shape.batch_size / statistics.median(seconds):,.1f}"


def size(memory: Mapping[str, int]) -> str:
    """Bytes after a step; on a CPU the most that the process had."""
    if "live_bytes" in memory:
        return f"{memory['live_bytes'] / 2**20:,.1f} MB"
    return f"{memory['peak_bytes'] / 2**20:,.1f} MB (process)"


def report(measured: Measured, base: Measured, device: torch.device) -> str:
    """What a participant reads of one stage: the text of ``stage*_output.log``."""
    stage, observations = measured.stage, measured.observations
    assert observations is not None, "the baseline has no report"
    split = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in observations.phases.items())
    lines = [
        f"Stage {stage.number}: {stage.title}",
        f"  device    {device_name(device)}, {group_for(device)}",
        f"  loss      {measured.first_loss:.2f} first (published: {stage.loss})",
        f"  speed     {speed(measured.seconds, device)} samples/s (published: {stage.speed}); "
        f"over V1 {ratio(base.seconds, measured.seconds)}",
    ]
    if not stage.parts.waits:
        lines.append(f"  reported  {speed(measured.reported, device)} samples/s by its own clock")
    lines += [
        f"  phases    {split}; the step {measured.time * 1e3:.2f} ms",
        f"  memory    {size(measured.memory)} (published: {stage.memory})",
    ]
    if observations.lost:
        lines.append(
            f"  NO GRADIENT at {len(observations.lost)} parameters: {', '.join(observations.lost)}"
        )
    for name, losses in observations.losses.items():
        fall = f"{losses[0]:.3f} -> {losses[-1]:.3f}, {len(losses)} steps"
        lines.append(f"  on text   {name}: {fall}")
    if device.type == "cpu" and not stage.parts.blas:
        lines.append(
            "  on a CPU  SwiGLU is PyTorch's: its naive kernel would be interpreted. "
            "Its cost needs a GPU."
        )
    lines += [f"  {stage.lesson}", f"  check     {stage.check}"]
    for which, (outcome, message) in observations.verdicts.items():
        color = {"failed": "RED", "passed": "GREEN"}.get(outcome, "NOT HERE")
        lines.append(f"    {which:9} {color}" + (f": {message}" if message else ""))
    lines.append(f"  fix       {stage.fix}")
    return "\n".join(lines) + "\n"


def issue(measured: Measured, stages: Sequence[Measured]) -> str:
    """The key issue of a stage; of one without a fault OPTIMAL, if no right one was faster."""
    stage = measured.stage
    if stage.fault or not stage.number:
        return stage.issue
    right = [other for other in stages if other.stage.parts.differentiable]
    fastest = min(right, key=lambda other: other.time)
    return stage.issue if fastest is measured else f"none, but {fastest.name} is faster here"


def table(stages: Sequence[Measured], device: torch.device) -> list[tuple[str, ...]]:
    """The rows of the published table, headings first, with its figures in brackets."""
    base = stages[0]
    rows: list[tuple[str, ...]] = [
        ("", "Loss", "Speed (samples/s)", "vs Baseline", "Key issue", "Memory")
    ]
    for measured in stages:
        stage = measured.stage
        reported = "" if stage.parts.waits else f", reported {speed(measured.reported, device)}"
        rows.append(
            (
                f"Stage {stage.number}" if stage.number else stage.title,
                f"{measured.first_loss:.1f} ({stage.loss})",
                f"{speed(measured.seconds, device)}{reported} ({stage.speed})",
                "1" if measured is base else f"{ratio(base.seconds, measured.seconds)}",
                issue(measured, stages),
                f"{size(measured.memory)} ({stage.memory})",
            )
        )
    return rows


def order(stages: Sequence[Measured], device: torch.device) -> list[str]:
    """Whether the stages stand in the published order: each ratio with its interval of 99%."""
    if device.type == "cpu":
        return ["The order of the stages by speed needs a GPU: a CPU interprets the kernels."]
    seconds = {measured.name: measured.seconds for measured in stages}
    lines = []
    for slow, fast in ORDER:
        if {slow, fast} <= seconds.keys():
            over = ratio(seconds[slow], seconds[fast])
            verdict = "holds" if over.low > 1 else "DOES NOT HOLD"
            lines.append(f"{fast} is faster than {slow}: {over}, {verdict}")
    return lines


def comparison(stages: Sequence[Measured], device: torch.device) -> str:
    """The published table as text, and the order by interval."""
    lines = aligned(table(stages, device))
    source = f"{device_name(device)}, {group_for(device)}; in brackets: published figures"
    return "\n".join([*lines, "", f"{source}, of another GPU.", "", *order(stages, device)]) + "\n"


def markdown(stages: Sequence[Measured], device: torch.device) -> str:
    """The same in Markdown, with where it is from; docs/workshop.md shows the one of a GPU."""
    lines = [f"- {line}" for line in order(stages, device)]
    where = f"{device_name(device)}, `{group_for(device)}`, torch {versions()['torch']}"
    source = f"Measured on {where}, commit {short(current_commit())}, {now()[:10]}."
    return "\n".join([markdown_table(table(stages, device)), "", *lines, "", source, ""])


def save(folder: Path, stages: Sequence[Measured], device: torch.device) -> list[Path]:
    """Write the log and the profile of each stage, and the comparison; the files."""
    texts = {"comparison.md": markdown(stages, device)}
    for measured in stages[1:]:
        assert measured.observations is not None
        texts[f"stage{measured.name}_output.log"] = report(measured, stages[0], device)
        texts[f"stage{measured.name}_profile.csv"] = profile_csv(measured.observations.kernels)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_text(folder / name, text)
    return [folder / name for name in texts]
