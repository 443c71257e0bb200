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
from tinyllama.harness.machine.files import replace_text, write_json
from tinyllama.harness.machine.worker import Worker, workers
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS, interleaved, ratio
from tinyllama.harness.records.results import current_commit, now, versions
from tinyllama.harness.records.results import folder as folder_of
from tinyllama.harness.report.tables import aligned
from tinyllama.training.diagnose import Diagnosis
from tinyllama.workshop.stages import STAGES, Parts, Stage

KIND = "stages"  # of a stored comparison, and its folder
COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")
TEXT_STEPS = 60
TURN = {"cpu": 0.05, "cuda": 0.2}  # seconds of a turn; at least one step
ORDER = (("2", "3"), ("4", "5"), ("v1", "5"))  # the first is slower
NONE = dict.fromkeys(("check", "issue", "lesson", "fix"), "")
BASELINE = Stage(0, "V1", Parts(), **NONE, speed="372.9", memory="522.3 MB")  # published figures


@dataclass
class Measured:
    """What was measured of a stage, of which number 0 is the baseline, V1. seconds, reported: of a
    step in each round, by a clock that waits and by the stage's own. memory: bytes, by what they
    are. verdicts: of the stage as it is and of the fixed one, the outcome of the check and its
    message."""

    stage: Stage
    first_loss: float
    seconds: list[float] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    lost: Sequence[str] = ()
    verdicts: Sequence[tuple[str, str, str]] = ()
    diagnosis: Diagnosis | None = None
    texts: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.stage.number or "v1")


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
        chosen = (BASELINE, *(STAGES[number] for number in numbers))
        stages = [_before_timing(started, Measured(stage, 0.0)) for stage in chosen]
        say(f"timing them alternately, {FEWEST_ROUNDS} rounds")
        _time(started, stages, device)
        for stage in stages[1:]:
            say(f"stage {stage.name}: its check, broken and fixed")
            _check(started[stage.name], stage, where, factory)
        return stages


def _before_timing(started: Mapping[str, Worker], measured: Measured) -> Measured:
    """Read what only steps may precede: the first loss, and the peak of memory."""
    worker = started[measured.name]
    memory = worker.call("step", "memory")
    measured.memory = {what: size for what, size in memory.items() if what != "graph_bytes"}
    measured.first_loss = worker.call("step", "loss_series")[0]
    return measured


def _time(started: Mapping[str, Worker], stages: Sequence[Measured], device: torch.device) -> None:
    turns: dict[str, Callable[[], float]] = {}
    for measured in stages:
        worker = started[measured.name]
        step = worker.call("step", "warm_up", 0.2)
        calls = max(1, min(20, round(TURN[device.type] / step) - UNTIMED))
        turns[measured.name] = partial(worker.call, "step", "turn", calls)
        if not measured.stage.parts.waits:
            turns[f"{measured.name} reported"] = partial(worker.call, "step", "reported", calls)
    seconds = interleaved(turns, FEWEST_ROUNDS)
    for measured in stages:
        measured.seconds = seconds[measured.name]
        measured.reported = seconds.get(f"{measured.name} reported", measured.seconds)


def _check(worker: Worker, measured: Measured, where: Mapping[str, Any], factory: str) -> None:
    """Check a stage after it was timed; the fixed stage is made in the same process."""
    stage = measured.stage
    measured.phases = worker.call("step", "phases")
    measured.kernels = worker.call("step", "kernels")
    measured.lost = worker.call("step", "lost")
    if not stage.parts.initialised:
        measured.diagnosis = worker.call("step", "diagnosed")
    if not stage.parts.differentiable:
        measured.texts = worker.call("step", "text_losses", TEXT_STEPS)
    verdicts = [("as it is", *worker.call("step", "check", stage.check))]
    if stage.fault is not None:
        worker.make("fixed", factory, number=stage.number, fixed=True, **where)
        verdicts.append(("fixed", *worker.call("fixed", "check", stage.check)))
        worker.drop("fixed")
    measured.verdicts = verdicts


def as_promised(measured: Measured) -> bool:
    """Whether the check was red with the fault, and green without; one that cannot be made on this
    device says so in the report."""
    expected = ["failed", "passed"] if measured.stage.fault else ["passed"]
    outcomes = [outcome for _, outcome, _ in measured.verdicts]
    return all(o in ("unsupported", e) for o, e in zip(outcomes, expected, strict=True))


# -- what is written --------------------------------------------------------------------------


def profile_csv(measured: Measured) -> str:
    """The kernels of a step, the slowest first, in the columns of `rocprof --stats`. A name's
    commas become semicolons, so that `sort -t,` finds its column."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\")
    rows.writerow(COLUMNS)
    total = sum(seconds for _, seconds in measured.kernels.values()) or 1.0
    ordered = sorted(measured.kernels.items(), key=lambda item: (-item[1][1], item[0]))
    for name, (calls, seconds) in ordered:
        plain = name.translate(str.maketrans(',"\n\r\\', ";'  /"))
        nanoseconds = round(seconds * 1e9)
        average = f"{nanoseconds / max(1, calls):.0f}"
        rows.writerow((plain, calls, nanoseconds, average, f"{100 * seconds / total:.2f}"))
    return text.getvalue()


def speed(seconds: Sequence[float], device: torch.device) -> str:
    return f"{group_for(device).shape.batch_size / statistics.median(seconds):,.1f}"


def memory(measured: Measured) -> str:
    """Bytes after a step; on a CPU the most that the process had."""
    if "live_bytes" in measured.memory:
        return f"{measured.memory['live_bytes'] / 2**20:,.1f} MB"
    return f"{measured.memory['peak_bytes'] / 2**20:,.1f} MB (process)"


def report(measured: Measured, base: Measured, device: torch.device) -> str:
    """What a participant reads of one stage: the text of ``stage*_output.log``."""
    stage, seconds = measured.stage, measured.seconds
    own_speed, over = speed(seconds, device), ratio(base.seconds, seconds)
    split = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in measured.phases.items())
    lines = [
        f"Stage {stage.number}: {stage.title}",
        f"  device    {device_name(device)}, {group_for(device)}",
        f"  loss      {measured.first_loss:.2f} first (published: {stage.loss})",
        f"  speed     {own_speed} samples/s (published: {stage.speed}); over V1 {over}",
        f"  phases    {split}; the step {statistics.median(seconds) * 1e3:.2f} ms",
        f"  memory    {memory(measured)} (published: {stage.memory})",
    ]
    if not stage.parts.waits:
        reported = speed(measured.reported, device)
        lines.insert(4, f"  reported  {reported} samples/s by its own clock")
    if measured.lost:
        names = ", ".join(measured.lost)
        lines.append(f"  NO GRADIENT at {len(measured.lost)} parameters: {names}")
    for name, losses in measured.texts.items():
        fall = f"{losses[0]:.3f} -> {losses[-1]:.3f}, {len(losses)} steps"
        lines.append(f"  on text   {name}: {fall}")
    if device.type == "cpu" and not stage.parts.blas:
        lines.append(
            "  on a CPU  SwiGLU is PyTorch's: its naive kernel would be interpreted. "
            "Its cost needs a GPU."
        )
    lines += [f"  {stage.lesson}", f"  check     {stage.check}"]
    for which, outcome, message in measured.verdicts:
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
    fastest = min(right, key=lambda other: statistics.median(other.seconds))
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
                f"{memory(measured)} ({stage.memory})",
            )
        )
    return rows


def comparison(stages: Sequence[Measured], device: torch.device) -> str:
    """The published table as text, and the order by interval."""
    lines = aligned(table(stages, device))
    source = f"{device_name(device)}, {group_for(device)}; in brackets: published figures"
    return "\n".join([*lines, "", f"{source}, of another GPU.", "", *order(stages, device)]) + "\n"


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
    if {"3", "4"} <= seconds.keys():
        over = ratio(seconds["3"], seconds["4"])
        verdict = "holds" if 0.95 <= over.median <= 1.05 else "DOES NOT HOLD"
        lines.append(f"3 and 4 take the same true time within 5%: {over}, {verdict}")
    return lines


def save(folder: Path, stages: Sequence[Measured], device: torch.device) -> list[Path]:
    """Write the log and the profile of each stage, and the comparison; the files."""
    texts = {"comparison.txt": comparison(stages, device)}
    for measured in stages[1:]:
        texts[f"stage{measured.name}_output.log"] = report(measured, stages[0], device)
        texts[f"stage{measured.name}_profile.csv"] = profile_csv(measured)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_text(folder / name, text)
    return [folder / name for name in texts]


def keep(root: Path, stages: Sequence[Measured], device: torch.device) -> Path:
    """Write the comparison below the results of the device, with where it is from; its path."""
    facts: dict[str, Any] = {
        "kind": KIND,
        "device": device_name(device),
        "group": str(group_for(device)),
        "versions": versions(),
        "commit": current_commit(),
        "date": now(),
    }
    stamp = facts["date"].translate(str.maketrans("", "", "-:"))
    path = folder_of(root, device_name(device)) / KIND / f"{stamp}-{facts['commit'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**facts, "rows": table(stages, device), "order": order(stages, device)})
    return path
