"""What the tables show of steps, ops and sweeps."""

from __future__ import annotations

from tinyllama.harness.page import numbers
from tinyllama.harness.page.numbers import MEBIBYTE
from tinyllama.harness.page.tables import (
    Cell,
    Column,
    Entry,
    Header,
    count,
    number,
    ratio,
    words,
)

MIB = 1 / MEBIBYTE


def _contender(entry: Entry) -> Cell:
    return Cell(entry["contender"], "peer" if entry["role"] == "peer" else "")


def _gradients(entry: Entry) -> Cell | None:
    if "gradients" not in entry:
        return None
    return Cell(f"{entry['gradients']}/{entry.get('parameters', '?')}")


def _loss(entry: Entry) -> Cell | None:
    if "first_loss" not in entry or "last_loss" not in entry:
        return None
    first, last = (numbers.significant(entry[name]) for name in ("first_loss", "last_loss"))
    return Cell(f"{first} → {last}")


def _layouts(entry: Entry) -> Cell | None:
    found = entry.get("layouts")
    if not found:
        return None
    name = max(found, key=lambda name: found[name][0])
    return Cell(numbers.significant(found[name][0]), name)


CONTENDER = Column(Header("contender", words=True), _contender)
STEP = (
    CONTENDER,
    number("time", "seconds", "ms / step", 1e3, "wall time; beneath it the quartiles"),
    ratio("over v1", "over_v1", "×, 99%", meaning="v1's time over this one, within the run"),
    ratio("floor share", "floor_share", "%, 99%", 100, "the floor's time over this one"),
    number("peak", "peak_bytes", "MiB", MIB, "the most memory of a step"),
    count("kernels", "kernels", "launched per step"),
    number("energy", "joules_per_sample", "J / sample"),
    number("MFU", "mfu", "%", 100, "of the measured ceiling of products in this precision"),
    number("rate", "samples_per_second", "samples / s"),
    number("tokens", "tokens_per_second", "tokens / s"),
    number("device", "device_seconds", "ms / step", 1e3, "the device's own clock"),
    number("host", "host_seconds", "ms / step", 1e3, "enqueueing a step, without waiting"),
    number("live", "live_bytes", "MiB", MIB, "memory held after a step"),
    number(
        "graph pool", "graph_bytes", "MiB", MIB, "of live and peak, in the pool of a captured graph"
    ),
    count("copies", "copies", "per step"),
    count("syncs", "host_syncs", "host waits for the device, per step"),
    number("power", "watts", "W"),
    number(
        "compile",
        "compile_seconds",
        "s",
        meaning="to the first step, caches empty, others perhaps made meanwhile",
    ),
    Column(Header("gradients", "", "parameters with a right gradient, of all"), _gradients),
    Column(Header("loss", "", "of the first and the last timed step"), _loss),
    words("run as", "plan"),
    words("description", "title", note="software"),
)
OP = (
    words("op", "op", note="case"),
    words("provider", "provider", note="role"),
    words("pass", "passes", note="values"),
    number("time", "seconds", "µs", 1e6, "device time, cold caches; beneath it the quartiles"),
    number("bandwidth", "bandwidth_share", "%", 100, "of the measured ceiling", bar=True),
    number("roofline", "roofline_share", "%", 100, "the least time over this one", bar=True),
    words("bound", "bound"),
    number("peak", "peak_bytes", "MiB", MIB, "memory beyond the inputs"),
    ratio("over eager", "over_eager", "×, 99%", meaning="eager's time over this one"),
    number("moved", "bytes_per_second", "GB / s", 1e-9),
    number("rate", "flops_per_second", "TFLOP / s", 1e-12),
    number("products", "flops_share", "%", 100, "of the measured ceiling", bar=True),
    count("kernels", "kernels", "per call"),
    number("host", "host_seconds", "µs", 1e6, "enqueueing, without waiting"),
    Column(Header("worst layout", "×", "how many times longer than contiguous"), _layouts),
)
SWEEP = (
    CONTENDER,
    count("batch", "batch_size"),
    count("length", "seq_len"),
    number("time", "seconds", "ms / step", 1e3, "wall time; beneath it the quartiles"),
    number("rate", "samples_per_second", "samples / s"),
    number("peak", "peak_bytes", "MiB", MIB, "the most memory of a step"),
)
