"""What the tables show of steps, ops and sweeps."""

from collections.abc import Callable
from typing import Any

from tinyllama.harness.page.tables import Cell, Column, Header, column, words
from tinyllama.harness.records import numbers
from tinyllama.harness.records.entries import OpEntry, StepEntry, Timed

MIB = 1 / numbers.MEBIBYTE


def _gradients(entry: StepEntry) -> Cell | None:
    if entry.gradients is None:
        return None
    return Cell(f"{entry.gradients}/{'?' if entry.parameters is None else entry.parameters}")


def _loss(entry: StepEntry) -> Cell | None:
    if entry.first_loss is None or entry.last_loss is None:
        return None
    return Cell(" → ".join(map(numbers.significant, (entry.first_loss, entry.last_loss))))


def _layouts(entry: OpEntry) -> Cell | None:
    if not entry.layouts:
        return None
    name, worst = max(entry.layouts.items(), key=lambda item: item[1].median)
    return Cell(numbers.significant(worst.median), name)


def _over(baseline: str | None) -> Column[Any]:
    meaning = f"{baseline}'s time over this one, within the run"
    return column(f"over {baseline or 'baseline'}", "over_baseline", "×, 99%", meaning=meaning)


COMPILING = "to the first step, caches empty, others perhaps made meanwhile"
Who = Callable[[Timed], Cell]  # the cell of a contender or a provider


def sweep(who: Who) -> tuple[Column[Any], ...]:
    """The columns of the points of a sweep."""
    return (
        Column(Header("contender", words=True), who),
        column("batch", "batch_size"),
        column("length", "seq_len"),
        column("time", "seconds", "ms / step", 1e3, "wall time; beneath it the quartiles"),
        column("rate", "samples_per_second", "samples / s"),
        column("peak", "peak_bytes", "MiB", MIB, "the most memory of a step"),
    )


def step(who: Who, baseline: str | None) -> tuple[Column[Any], ...]:
    """The columns of steps whose ratios are over a contender."""
    return (
        Column(Header("contender", words=True), who),
        column("time", "seconds", "ms / step", 1e3, "wall time; beneath it the quartiles"),
        _over(baseline),
        column("floor share", "floor_share", "%, 99%", 100, "the floor's time over this one"),
        column("peak", "peak_bytes", "MiB", MIB, "the most memory of a step"),
        column("kernels", "kernels", meaning="launched per step"),
        column("energy", "joules_per_sample", "J / sample"),
        column("MFU", "mfu", "%", 100, "of the measured ceiling of products in this precision"),
        column("rate", "samples_per_second", "samples / s"),
        column("tokens", "tokens_per_second", "tokens / s"),
        column("device", "device_seconds", "ms / step", 1e3, "the device's own clock"),
        column("host", "host_seconds", "ms / step", 1e3, "enqueueing a step, without waiting"),
        column("live", "live_bytes", "MiB", MIB, "memory held after a step"),
        column("uncaptured", "held_bytes", "MiB", MIB, "the same, uncaptured and in fp32"),
        column("graph pool", "graph_bytes", "MiB", MIB, "of live and peak, in a captured graph"),
        column("copies", "copies", meaning="per step"),
        column("syncs", "host_syncs", meaning="host waits for the device, per step"),
        column("power", "watts", "W"),
        column("compile", "compile_seconds", "s", 1.0, COMPILING),
        Column(Header("gradients", "", "parameters with a right gradient, of all"), _gradients),
        Column(Header("loss", "", "of the first and the last timed step"), _loss),
        words("run as", "plan"),
        words("description", "title", note="software"),
    )


def op(who: Who, baseline: str | None) -> tuple[Column[Any], ...]:
    """The columns of ops whose ratios are over a provider."""
    return (
        words("op", "op", note="case"),
        Column(Header("provider", words=True), who),
        words("pass", "passes", note="values"),
        column("time", "seconds", "µs", 1e6, "device time, cold caches; beneath it the quartiles"),
        column("bandwidth", "bandwidth_share", "%", 100, "of the measured ceiling", bar=True),
        column("roofline", "roofline_share", "%", 100, "the least time over this one", bar=True),
        words("bound", "bound"),
        column("peak", "peak_bytes", "MiB", MIB, "memory beyond the inputs"),
        _over(baseline),
        column("moved", "bytes_per_second", "GB / s", 1e-9),
        column("rate", "flops_per_second", "TFLOP / s", 1e-12),
        column("products", "flops_share", "%", 100, "of the measured ceiling", bar=True),
        column("kernels", "kernels", meaning="per call"),
        column("host", "host_seconds", "µs", 1e6, "enqueueing, without waiting"),
        Column(Header("worst layout", "×", "how many times longer than contiguous"), _layouts),
    )
