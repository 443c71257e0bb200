"""What profiles say, as tables in a terminal. Nothing here needs torch."""

from typing import Any

from rich.table import Table

from tinyllama.harness.report.terminal import console
from tinyllama.profiling.readers import Profile


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
    out, total = console(), sum(kernel.nanoseconds for kernel in profile.totals) or 1
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
    first, second = ({total.name: total for total in p.totals} for p in (before, after))

    def change(name: str) -> int:
        """Nanoseconds that the second profile takes more."""
        old, new = (by_name.get(name) for by_name in (first, second))
        return (new.nanoseconds if new else 0) - (old.nanoseconds if old else 0)

    names = sorted({**first, **second}, key=lambda name: (-abs(change(name)), name))
    out = console()
    table = columns("kernel", "", "calls before", "after", "us before", "after", left=2)
    for name in names[:top]:
        sides = (first.get(name), second.get(name))
        kind = "appeared" if sides[0] is None else "vanished" if sides[1] is None else "moved"
        calls = [f"{total.calls}" if total else "-" for total in sides]
        microseconds = [f"{total.nanoseconds / 1e3:.1f}" if total else "-" for total in sides]
        table.add_row(name, kind, *calls, *microseconds)
    out.print(table)
    if len(names) > top:
        out.print(f"... {len(names) - top} more: --top {len(names)}")
    out.print(f"{before.summary} before, {after.summary} after")


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
