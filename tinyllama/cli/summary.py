"""How a training run looks in a terminal: the progress bar, the summary, the diagnosis."""

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tinyllama.harness.report.terminal import console
from tinyllama.model.config import TrainConfig
from tinyllama.training.diagnose import Diagnosis, Statistics
from tinyllama.training.result import COMPLETED, Result
from tinyllama.training.train import StepRecord


@contextmanager
def progress_bar(config: TrainConfig) -> Iterator[Callable[[StepRecord], None]]:
    """A bar on stderr with loss and speed, if that is a terminal. It gives a function to be
    called after each step. An error before the first step removes the bar: only its line remains.
    """
    err = console(sys.stderr)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    description = TextColumn("{task.description}")
    progress = Progress(description, *columns, console=err, disable=not err.is_terminal)
    task = progress.add_task("warming up", total=config.num_steps, state="")

    def update(record: StepRecord) -> None:
        samples = config.samples_per_step / record.seconds
        speed = f"{samples:,.1f} samples/s  {samples * config.seq_len:,.0f} tokens/s"
        state = f"loss {record.loss:.4f}  {speed}"
        progress.update(task, advance=1, description="training", state=state)

    with progress:
        try:
            yield update
        finally:
            if not progress.tasks[0].completed:
                progress.update(task, visible=False)


def print_summary(result: Result, out: Console) -> None:
    """Print a result without its diagnoses; errors come last, so that they are seen."""
    for name, value in _rows(result):
        out.print(f"{name:<13}{value}", soft_wrap=True)
    if result.lost:
        out.print(
            f"NO GRADIENT at {len(result.lost)} of {len(result.gradients)} parameters:",
            style="bold red",
        )
        for name, why in result.lost.items():
            out.print(f"  {name}: {why}", style="red")
    if result.status != COMPLETED:
        out.print(f"{result.status}: {result.reason}", style="bold red")


def print_diagnosis(diagnosis: Diagnosis, out: Console) -> None:
    """A table of every op's output and gradient; what is not finite is red."""
    loss = "not finite" if diagnosis.loss is None else f"{diagnosis.loss:.4f}"
    table = Table(
        title=f"Step {diagnosis.step}, loss {loss}, run again for this table: "
        "uncompiled and uncaptured"
    )
    table.add_column("op", no_wrap=True)
    for what in ("output", "gradient"):
        for column in ("minimum", "maximum", "std", "not finite"):
            table.add_column(f"{what}\n{column}", justify="right")
    for op in diagnosis.ops:
        tensors = (op.output, op.gradient)
        sick = any(tensor and tensor.nonfinite for tensor in tensors)
        cells = [cell for tensor in tensors for cell in _cells(tensor)]
        table.add_row(op.name, *cells, style="red" if sick else None)
    out.print(table)


def _rows(result: Result) -> Iterable[tuple[str, str]]:
    """Names and values of the summary, in order."""
    model, train = result.model, result.train
    yield "tier", f"{result.tier}, {result.plan}, {train.precision}"
    for part, why in result.left_out.items():
        yield "left out", f"{part}: {why}"
    yield "device", result.device
    if result.ranks > 1:
        how = "shards of all parameters (FSDP2)" if result.in_shards else "all parameters"
        yield "ranks", f"{result.ranks}, each with {how} and its part of the batch"
    yield "versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield (
        "model",
        f"{result.parameters:,} parameters: hidden {model.hidden_dim}, {model.num_layers} layers, "
        f"{model.num_heads} heads, {model.num_kv_heads} kv heads",
    )
    kind, *details = [item for item in result.batches.items() if item[0] != "sha256"]
    yield (
        "data",
        ", ".join([kind[1], *(f"{value} {name.replace('_', ' ')}" for name, value in details)]),
    )
    times = f"{train.accumulate} x " if train.accumulate > 1 else ""
    yield "batch", f"{times}{train.batch_size} x {train.seq_len} tokens, seed {train.seed}"
    done = len(result.losses)
    yield "steps", f"{result.start + 1} to {result.start + done}" if done else "none"
    if result.losses:
        yield "loss", f"{result.losses[0]:.4f} first, {result.losses[-1]:.4f} last"
        yield (
            "speed",
            f"{result.samples_per_second:,.1f} samples/s, {result.tokens_per_second:,.0f} tokens/s",
        )
        yield "step", f"{statistics.median(result.step_seconds) * 1e3:.2f} ms, median"
    norms = [norm for norm in result.gradient_norms if norm is not None]
    if norms and train.max_grad_norm is not None:
        clipped = sum(norm > train.max_grad_norm for norm in norms)
        yield (
            "clipped",
            f"{clipped} of {done} steps, to norm {train.max_grad_norm:g} "
            f"(it was {min(norms):.3g} to {max(norms):.3g})",
        )
    if result.phase_seconds:
        phases = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in result.phase_seconds.items())
        yield "phases", f"{phases} (each run by itself)"
    memory = result.memory
    yield "live memory", f"{_size(memory.live_bytes)} ({memory.live_means})"
    yield "peak memory", f"{_size(memory.peak_bytes)} ({memory.peak_means})"
    if result.gradients:
        received = sum(result.gradients.values())
        yield "gradients", f"{received} of {len(result.gradients)} parameters received one"


def _cells(tensor: Statistics | None) -> list[str]:
    if tensor is None:
        return ["-"] * 4
    numbers = (tensor.minimum, tensor.maximum, tensor.std)
    return [*("-" if n is None else f"{n:.3g}" for n in numbers), f"{tensor.nonfinite:.1%}"]


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
