"""Run stages, each in a process of its own and all timed alternately, and write what was seen."""

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
from tinyllama.workshop.stages import STAGES, Stage

BASELINE = "v1"
KIND = "stages"  # of what is kept, and its folder
COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")
TEXT_STEPS = 60
TURN = {"cpu": 0.05, "cuda": 0.2}  # seconds of a turn; at least one step
BASELINE_SPEED, BASELINE_MEMORY = "372.9", "522.3 MB"  # the documents'
ORDER = ((2, 3), (4, 5))  # the first is slower


@dataclass
class Seen:
    """What was seen of a stage, or of the baseline. seconds, reported: of a step in each round, by
    a clock that waits and by the stage's own. memory: bytes, by what they are."""

    name: str
    stage: Stage | None
    first_loss: float
    seconds: list[float]
    reported: list[float] = field(default_factory=list)
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    lost: Sequence[str] = ()
    verdicts: Sequence[tuple[str, str, str]] = ()  # broken or fixed; outcome; what was seen
    diagnosis: Diagnosis | None = None
    texts: Mapping[str, Sequence[float]] = field(default_factory=dict)


def group_for(device: torch.device) -> Group:
    """The documents' workload; on a CPU the tiny one."""
    return Group("tiny" if device.type == "cpu" else "small", "fp32")


def run(
    numbers: Sequence[int], device: torch.device, say: Callable[[str], None] = lambda _: None
) -> list[Seen]:
    """The baseline and the stages with these numbers. Raises WorkerError for one that fails."""
    group = group_for(device)
    where: dict[str, Any] = {"group": str(group), "device": str(device)}
    factory = "tinyllama.workshop.contender:StageStep"
    with workers() as started:
        for name in (BASELINE, *map(str, numbers)):
            started[name] = Worker(name, preload=[factory.partition(":")[0]])
        say(f"making {BASELINE} and {len(numbers)} stages")
        started[BASELINE].make("step", "tinyllama.bench.steps:TierStep", tier=BASELINE, **where)
        for number in numbers:
            started[str(number)].make("step", factory, number=number, **where)
        found = {name: _alone(worker, name) for name, worker in started.items()}
        _time(started, found, device, say)
        for number in numbers:
            say(f"stage {number}: its check, broken and fixed")
            _check(started[str(number)], found[str(number)], where, factory)
        return list(found.values())


def _alone(worker: Worker, name: str) -> Seen:
    """What is read before anything but a step has run."""
    memory = {what: n for what, n in worker.call("step", "memory").items() if what != "graph_bytes"}
    stage = None if name == BASELINE else STAGES[int(name)]
    return Seen(name, stage, worker.call("step", "loss_series")[0], [], memory=memory)


def _time(
    started: Mapping[str, Worker],
    found: Mapping[str, Seen],
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    say(f"timing them alternately, {FEWEST_ROUNDS} rounds")
    turns: dict[str, Callable[[], float]] = {}
    for name, worker in started.items():
        step = worker.call("step", "warm_up", 0.2)
        calls = max(1, min(20, round(TURN[device.type] / step) - UNTIMED))

        turns[name] = partial(worker.call, "step", "turn", calls)
        stage = found[name].stage
        if stage is not None and not stage.parts.waits:
            turns[f"{name} reported"] = partial(worker.call, "step", "reported", calls)
    seconds = interleaved(turns, FEWEST_ROUNDS)
    for name, seen in found.items():
        seen.seconds = seconds[name]
        seen.reported = seconds.get(f"{name} reported", seconds[name])


def _check(worker: Worker, seen: Seen, where: Mapping[str, Any], factory: str) -> None:
    """What is asked of a stage after it was timed; the fixed stage is made in the same process."""
    stage = seen.stage
    assert stage is not None
    seen.phases = worker.call("step", "phases")
    seen.kernels = worker.call("step", "kernels")
    seen.lost = worker.call("step", "lost")
    if not stage.parts.initialised:
        seen.diagnosis = worker.call("step", "diagnosed")
    if not stage.parts.differentiable:
        seen.texts = worker.call("step", "text_losses", TEXT_STEPS)
    verdicts = [("as it is", *worker.call("step", "check", stage.check))]
    if stage.fault is not None:
        worker.make("fixed", factory, number=stage.number, fixed=True, **where)
        verdicts.append(("fixed", *worker.call("fixed", "check", stage.check)))
        worker.drop("fixed")
    seen.verdicts = verdicts


def as_promised(seen: Seen) -> bool:
    """Whether the check was red with the fault, and green without; one that cannot be made on this
    device says so in the report."""
    broken = seen.stage is not None and seen.stage.fault is not None
    expected = ["failed", "passed"] if broken else ["passed"]
    outcomes = [outcome for _, outcome, _ in seen.verdicts]
    return all(o in ("unsupported", e) for o, e in zip(outcomes, expected, strict=True))


# -- what is written --------------------------------------------------------------------------


def profile_csv(seen: Seen) -> str:
    """The kernels of a step, the slowest first, in the columns of `rocprof --stats`. A name's
    commas become semicolons, so that `sort -t,` finds its column."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\")
    rows.writerow(COLUMNS)
    whole = sum(seconds for _, seconds in seen.kernels.values()) or 1.0
    ordered = sorted(seen.kernels.items(), key=lambda one: (-one[1][1], one[0]))
    for name, (calls, seconds) in ordered:
        plain = name.translate(str.maketrans(',"\n\r\\', ";'  /"))
        nanoseconds = round(seconds * 1e9)
        average = nanoseconds / max(1, calls)
        rows.writerow((plain, calls, nanoseconds, f"{average:.0f}", f"{seconds / whole:.2%}"[:-1]))
    return text.getvalue()


def speed(seen: Seen, seconds: Sequence[float], samples: int) -> str:
    return f"{samples / statistics.median(seconds):,.1f}"


def report(seen: Seen, base: Seen, device: torch.device) -> str:
    """What a participant reads of one stage: the text of ``stage*_output.log``."""
    stage, samples = seen.stage, group_for(device).shape.batch_size
    assert stage is not None
    lines = [
        f"Stage {stage.number}: {stage.title}",
        f"  device    {device_name(device)}, {group_for(device)}",
        f"  loss      {seen.first_loss:.2f} first (documents: {stage.loss})",
        f"  speed     {speed(seen, seen.seconds, samples)} samples/s "
        f"(documents: {stage.speed}); over V1 {ratio(base.seconds, seen.seconds)}",
    ]
    if not stage.parts.waits:
        lines.append(
            f"  reported  {speed(seen, seen.reported, samples)} samples/s by its own clock"
        )
    split = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in seen.phases.items())
    whole = statistics.median(seen.seconds) * 1e3
    lines.append(f"  phases    {split}; the whole step {whole:.2f} ms")
    lines.append(f"  memory    {memory(seen)} (documents: {stage.memory})")
    if seen.lost:
        lines.append(f"  NO GRADIENT at {len(seen.lost)} parameters: {', '.join(seen.lost)}")
    for name, losses in seen.texts.items():
        lines.append(
            f"  on text   {name}: {losses[0]:.3f} -> {losses[-1]:.3f}, {len(losses)} steps"
        )
    if device.type == "cpu" and not stage.parts.blas:
        lines.append(
            "  on a CPU  SwiGLU is PyTorch's: its naive kernel would be interpreted. "
            "Its cost needs a GPU."
        )
    lines += [f"  {stage.lesson}", f"  check     {stage.check}"]
    for which, outcome, what in seen.verdicts:
        shown = {"failed": "RED", "passed": "GREEN"}.get(outcome, "NOT HERE")
        lines.append(f"    {which:9} {shown}" + (f": {what}" if what else ""))
    lines.append(f"  fix       {stage.fix}")
    return "\n".join(lines) + "\n"


def memory(seen: Seen) -> str:
    """Bytes after a step; on a CPU the most that the process held."""
    if "live_bytes" in seen.memory:
        return f"{seen.memory['live_bytes'] / 2**20:,.1f} MB"
    return f"{seen.memory['peak_bytes'] / 2**20:,.1f} MB (process)"


def table(found: Sequence[Seen], device: torch.device) -> list[tuple[str, ...]]:
    """The rows of the documents' table, headings first, with their figures in brackets."""
    samples = group_for(device).shape.batch_size
    base, stages = found[0], found[1:]
    rows: list[tuple[str, ...]] = [
        ("", "Loss", "Speed (samples/s)", "vs Baseline", "Key issue", "Memory")
    ]
    own = (f"{base.first_loss:.1f}", f"{speed(base, base.seconds, samples)} ({BASELINE_SPEED})")
    rows.append(("V1", *own, "1", "", f"{memory(base)} ({BASELINE_MEMORY})"))
    for seen in stages:
        stage = seen.stage
        assert stage is not None
        told = speed(seen, seen.seconds, samples)
        if not stage.parts.waits:
            told += f", reported {speed(seen, seen.reported, samples)}"
        rows.append(
            (
                f"Stage {stage.number}",
                f"{seen.first_loss:.1f} ({stage.loss})",
                f"{told} ({stage.speed})",
                f"{ratio(base.seconds, seen.seconds)}",
                stage.issue,
                f"{memory(seen)} ({stage.memory})",
            )
        )
    return rows


def comparison(found: Sequence[Seen], device: torch.device) -> str:
    """The documents' table as text, and the order by interval."""
    lines = aligned(table(found, device))
    lines += ["", f"{device_name(device)}, {group_for(device)}; in brackets: the documents.", ""]
    return "\n".join([*lines, *order(found, device)]) + "\n"


def order(found: Sequence[Seen], device: torch.device) -> list[str]:
    """Whether the stages stand in the documents' order: each ratio with its interval of 99%."""
    if device.type == "cpu":
        return ["The order of the stages by speed needs a GPU: a CPU interprets the kernels."]
    seconds = {seen.name: seen.seconds for seen in found}
    pairs = [*((str(slow), str(fast)) for slow, fast in ORDER), (BASELINE, "5")]
    lines = []
    for slow, fast in pairs:
        if {slow, fast} <= seconds.keys():
            over = ratio(seconds[slow], seconds[fast])
            holds = "holds" if over.low > 1 else "DOES NOT HOLD"
            lines.append(f"{fast} is faster than {slow}: {over}, {holds}")
    if {"3", "4"} <= seconds.keys():
        over = ratio(seconds["3"], seconds["4"])
        holds = "holds" if 0.95 <= over.median <= 1.05 else "DOES NOT HOLD"
        lines.append(f"3 and 4 take the same true time within 5%: {over}, {holds}")
    return lines


def save(folder: Path, found: Sequence[Seen], device: torch.device) -> list[Path]:
    """Write the log and the profile of each stage, and the comparison; the files."""
    texts: dict[str, Any] = {"comparison.txt": comparison(found, device)}
    for seen in found[1:]:
        texts[f"stage{seen.name}_output.log"] = report(seen, found[0], device)
        texts[f"stage{seen.name}_profile.csv"] = profile_csv(seen)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_text(folder / name, text)
    return [folder / name for name in texts]


def keep(root: Path, found: Sequence[Seen], device: torch.device) -> Path:
    """Write the comparison below the results of the device, with where it is from; its path."""
    facts: dict[str, Any] = {
        "kind": KIND,
        "device": device_name(device),
        "group": str(group_for(device)),
        "versions": versions(),
        "commit": current_commit(),
        "date": now(),
    }
    rows, lines = table(found, device), order(found, device)
    stamp = facts["date"].translate(str.maketrans("", "", "-:"))
    path = folder_of(root, device_name(device)) / KIND / f"{stamp}-{facts['commit'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**facts, "rows": rows, "order": lines})
    return path
