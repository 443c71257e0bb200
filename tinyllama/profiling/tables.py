"""What profiles say, as tables in a terminal. Nothing here needs torch."""

from typing import Any

from rich.table import Table

from tinyllama.harness.report.terminal import console
from tinyllama.profiling.profiles import Profile, compare


def columns(*names: str, left: int = 1) -> Table:
    """A table whose first columns are text, and whose others are numbers."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(names):
        if place < left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def show_profile(profile: Profile, top: int) -> None:
    """Print the slowest kernels and the counters of a profile."""
    out, total = console(), profile.nanoseconds or 1
    table = columns("kernel", "calls", "us", "share")
    for kernel in profile.totals[:top]:
        share = f"{kernel.nanoseconds / total:.1%}"
        table.add_row(kernel.name, f"{kernel.calls}", f"{kernel.nanoseconds / 1e3:.1f}", share)
    out.print(table)
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
