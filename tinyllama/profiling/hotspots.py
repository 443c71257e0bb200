"""One step as PyTorch's profiler saw it, as tables in a terminal: kernels with their ops, the time
by op and by kind of work, and the rates of the ops."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.table import Table

from tinyllama.harness.measure.launches import covered, kind_of
from tinyllama.harness.report.terminal import console
from tinyllama.profiling.flops import BACKWARD
from tinyllama.profiling.ranges import UNKNOWN, Work
from tinyllama.profiling.tables import columns

Key = TypeVar("Key")
MOST_UNMAPPED = 0.01  # share of the time that may belong to no op


def show_step(facts: dict[str, Any], work: Sequence[Work], top: int) -> None:
    """Print the slowest kernels with their ops, the time by op and by kind, and the rates."""
    out, unit = console(), "operator" if facts["device"] == "cpu" else "kernel"
    total = _seconds(work) or 1.0
    slowest = _slowest(work, lambda kernel: (kernel.name, op_of(kernel)))
    table = columns(unit, "op", "layers", "calls", "us", "share", left=3)
    for (name, op), kernels in slowest[:top]:
        table.add_row(name, op, layers_of(kernels), *_figures(kernels, total))
    out.print(table)
    if len(slowest) > top:
        out.print(f"... {len(slowest) - top} more: --top {len(slowest)}")
    out.print(_grouped("op", work, op_of, total))
    kinds = _grouped("kind", work, lambda kernel: kind_of(kernel.name), total)
    spans = [(start * 1e-6, end * 1e-6) for start, end in facts["spans_us"]]  # none on a CPU
    busy = covered(spans)
    length = max(end for _, end in spans) - spans[0][0] if spans else 0.0
    if spans:
        kinds.add_row(
            "no kernel", "", f"{(length - busy) * 1e6:.1f}", f"{(length - busy) / total:.1%}"
        )
    out.print(kinds)
    out.print(_rates(facts, {name: _seconds(kernels) for name, kernels in _slowest(work, op_of)}))
    lost = _seconds(kernel for kernel in work if kernel.op == UNKNOWN) / total
    if lost > MOST_UNMAPPED:
        out.print(f"{lost:.1%} of the time belongs to no op: see {UNKNOWN!r} above")
    per_step = f"{len(work)} {unit}s a step, {total * 1e6:.0f} us in them"
    out.print(f"plan {facts['plan']}: {per_step}")
    if spans:
        overlapped = sum(end - start for start, end in spans) - busy
        out.print(
            f"a kernel runs in {busy * 1e6:.0f} of {length * 1e6:.0f} us; "
            f"{overlapped * 1e6:.0f} us are of kernels that overlap others"
        )
        alone = facts["unprofiled_seconds"] * 1e6
        out.print(f"without the profiler the host waits {alone:.0f} us for a step")


def op_of(kernel: Work) -> str:
    """The op without its layer, and whether it is its backward pass."""
    op = kernel.op.rpartition(".")[2]
    return op + BACKWARD if kernel.backward else op


def layers_of(work: Iterable[Work]) -> str:
    """The layers that work belongs to, as in ``0-7``; empty for what is in none."""
    parts = {part for kernel in work for part in kernel.op.split(".") if part.isdigit()}
    numbers = sorted(map(int, parts))
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _seconds(work: Iterable[Work]) -> float:
    return sum(kernel.seconds for kernel in work)


def _slowest(work: Iterable[Work], key: Callable[[Work], Key]) -> list[tuple[Key, list[Work]]]:
    """The work of each key, the slowest first."""
    groups: dict[Key, list[Work]] = {}
    for kernel in work:
        groups.setdefault(key(kernel), []).append(kernel)
    return sorted(groups.items(), key=lambda item: -_seconds(item[1]))


def _figures(work: Sequence[Work], total: float) -> tuple[str, str, str]:
    seconds = _seconds(work)
    return f"{len(work)}", f"{seconds * 1e6:.1f}", f"{seconds / total:.1%}"


def _grouped(title: str, work: Sequence[Work], key: Callable[[Work], str], total: float) -> Table:
    table = columns(title, "calls", "us", "share")
    for name, kernels in _slowest(work, key):
        table.add_row(name, *_figures(kernels, total))
    return table


def _rates(facts: dict[str, Any], seconds: dict[str, float]) -> Table:
    """Each op's bandwidth and rate of operations, and their shares of the measured ceilings."""
    copy, product = facts["bytes_per_second"], facts["flops_per_second"]
    table = columns("op", "us", "GB/s", "of a copy", "GFLOP/s", "of a product")
    for name, took in seconds.items():
        if took and (cost := facts["costs"].get(name)):
            moved, done = cost["bytes"] / took, cost["flops"] / took
            rates = f"{moved * 1e-9:.1f}", f"{moved / copy:.0%}", f"{done * 1e-9:.1f}"
            table.add_row(name, f"{took * 1e6:.1f}", *rates, f"{done / product:.0%}")
    return table
