"""What a profile says, as tables in a terminal."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from tinyllama.harness.measure.launches import covered, kind_of
from tinyllama.harness.report.tables import console
from tinyllama.profiling import nsight, readers
from tinyllama.profiling.command_lines import NSIGHT
from tinyllama.profiling.flops import BACKWARD
from tinyllama.profiling.observe import TABLE, TRACE, load
from tinyllama.profiling.profiles import Profile, ProfileError, compare
from tinyllama.profiling.ranges import UNKNOWN, Work

Key = TypeVar("Key")
MOST_UNMAPPED = 0.01  # share of the time that may belong to no op


def columns(*names: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(names):
        if place < left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def read(path: Path) -> Profile:
    """A profile of any tool: a folder that one of them wrote, or one of its files. Raises
    ProfileError."""
    if path.is_dir():
        if (path / NSIGHT).is_file():
            return nsight.read(path / NSIGHT)
        step = path / readers.KERNELS
        return readers.of_step(step) if step.is_file() else readers.of_amd_folder(path)
    if not path.is_file():
        why = "is a pipe or a device" if path.exists() else "does not exist"
        raise ProfileError(f"{path} {why}: name a folder of profile, or a file of a tool")
    if path.name == readers.KERNELS:
        return readers.of_step(path)
    if path.suffix == ".db":
        return readers.of_database(path)
    if path.name.endswith((".json", ".json.gz")):
        return readers.of_trace(path)
    if path.suffix != ".csv":
        raise ProfileError(f"{path}: use a folder, or a file that ends with .csv, .db or .json")
    with readers.readable(path, "a CSV file"), path.open("rb") as file:
        start = file.read(10).removeprefix(b"\xef\xbb\xbf")
    of_nsight = start.startswith((b"==", nsight.HEADING.encode()))
    return nsight.read(path) if of_nsight else readers.of_csv(path)


def show(tool: str, way: str, folder: Path, top: int) -> None:
    """Print what a tool wrote into its folder."""
    if tool in OF_JSON:
        OF_JSON[tool](json.loads((folder / f"{tool}.json").read_text(encoding="utf-8")))
    elif way == "torch":
        show_step(*load(folder / readers.KERNELS), top)
        print(f"timeline for ui.perfetto.dev: {folder / TRACE}; operators: {folder / TABLE}")
    elif tool in ("hotspots", "counters"):
        show_profile(read(folder), top)
    else:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(path)


# -- one step, as PyTorch's profiler saw it -------------------------------------------------------


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


# -- profiles of any tool -------------------------------------------------------------------------


def show_profile(profile: Profile, top: int) -> None:
    """Print the slowest kernels and the counters of a profile."""
    out, total = console(), profile.nanoseconds or 1
    table = columns("kernel", "calls", "us", "share")
    for kernel in profile.totals[:top]:
        microseconds = f"{kernel.nanoseconds / 1e3:.1f}"
        table.add_row(
            kernel.name, f"{kernel.calls}", microseconds, f"{kernel.nanoseconds / total:.1%}"
        )
    out.print(table)
    if profile.dispatches:
        busy, span = profile.busy_ns / 1e3, profile.span_ns / 1e3
        out.print(f"a kernel runs in {busy:.1f} of {span:.1f} us")
    if profile.counters:
        table = columns("kernel", "counter", "sum, or mean in %", left=2)
        for counter in sorted(
            profile.counters, key=lambda counter: (counter.counter, -counter.value)
        ):
            value = f"{counter.value:g} {counter.unit}".rstrip()
            table.add_row(counter.kernel, counter.counter, value)
        out.print(table)


def show_changes(before: Profile, after: Profile, top: int) -> None:
    """Print the kernels of two profiles, the largest change of time first."""
    out, changes = console(), compare(before, after)
    table = columns("kernel", "", "calls before", "after", "us before", "after", left=2)
    for change in changes[:top]:
        sides = (change.before, change.after)
        calls = [f"{total.calls}" if total else "-" for total in sides]
        microseconds = [f"{total.nanoseconds / 1e3:.1f}" if total else "-" for total in sides]
        table.add_row(change.name, change.kind, *calls, *microseconds)
    out.print(table)
    if len(changes) > top:
        out.print(f"... {len(changes) - top} more: --top {len(changes)}")
    out.print(
        f"{before.calls} launches in {before.nanoseconds / 1e3:.1f} us before, "
        f"{after.calls} in {after.nanoseconds / 1e3:.1f} us after"
    )


# -- what `tinyllama.profiling.observe` wrote -----------------------------------------------------


def show_flops(facts: dict[str, Any]) -> None:
    out, table = console(), columns("counted by", "GFLOP a step")
    for name, flop in facts["flop"].items():
        table.add_row(name, f"{flop * 1e-9:.2f}")
    out.print(table)
    for name, reason in facts["unavailable"].items():
        out.print(f"{name}: {reason}")
    rate, milliseconds = facts["product_flops_per_second"], facts["step_seconds"] * 1e3
    out.print(
        f"model FLOP utilisation {facts['mfu']:.1%}: the model formula in {milliseconds:.2f} ms, "
        f"over {rate * 1e-12:.1f} TFLOP/s of a large product"
    )
    table = columns("op", "GFLOP a step", "share")
    total = sum(facts["by_op"].values())
    for name, flop in sorted(facts["by_op"].items(), key=lambda item: -item[1]):
        table.add_row(name, f"{flop * 1e-9:.2f}", f"{flop / total:.1%}")
    out.print(table)


def show_memory(facts: dict[str, Any]) -> None:
    out, total = console(), facts["peak_bytes"]
    table = columns("at the peak", "MiB", "share")
    for name, size in facts["at_peak_bytes"].items():
        table.add_row(name, f"{size / 2**20:.1f}", f"{size / total:.1%}")
    out.print(table)
    out.print(f"the peak, {total / 2**20:.1f} MiB, is in the {facts['peak_phase']} pass")


def show_triton(facts: dict[str, Any]) -> None:
    """Print the ops, and RMSNorm by the size of its block."""
    out = console()
    headings = ("op", "pass", "Triton us", "PyTorch us", "speed-up", "GB/s", "max error")
    table = columns(*headings, left=2)
    for op in facts["ops"]:
        error = f"{op['max_error']:.2e}"
        if "unavailable" in op:
            table.add_row(op["op"], "", "-", "-", "-", "-", error)
        for name, times in op.get("passes", {}).items():
            micros = [f"{times[key] * 1e6:.1f}" for key in ("seconds", "other_seconds")]
            rate = f"{times['bytes_per_second'] * 1e-9:.0f}"
            table.add_row(op["op"], name, *micros, f"{times['speedup']:.2f}x", rate, error)
    out.print(table)
    for reason in sorted({op["unavailable"] for op in facts["ops"] if "unavailable" in op}):
        out.print(f"not timed: {reason}")
    if reason := facts.get("block_sizes_unavailable"):
        out.print(reason)
        return
    headings, *rows = facts["block_sizes"]
    study = columns(*headings)
    for row in rows:
        study.add_row(*row)
    out.print("RMSNorm by the size of its block, 1024 rows of 2048 in float32:")
    out.print(study)


def show_energy(facts: dict[str, Any]) -> None:
    print(f"{facts['joules_per_sample']:.3g} J a sample, {facts['watts']:.0f} W")


OF_JSON = {"flops": show_flops, "memory": show_memory, "triton": show_triton, "energy": show_energy}
