"""What a profile says, as tables in a terminal."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tinyllama.harness.report.tables import console
from tinyllama.profiling import chrome, nsight, rocprof
from tinyllama.profiling.command_lines import NSIGHT
from tinyllama.profiling.kernels import Change, Profile, ProfileError, Total, of_dispatches, summed
from tinyllama.profiling.observe import KERNELS, TABLE, TRACE, load
from tinyllama.profiling.ranges import Work
from tinyllama.profiling.step_tables import columns
from tinyllama.profiling.step_tables import show as of_step

# -- reading --------------------------------------------------------------------------------------


def read(path: Path) -> Profile:
    """A profile of any tool: a folder that one of them wrote, or one of its files. Raises
    ProfileError."""
    if not path.exists():
        raise ProfileError(f"{path} does not exist: name a folder of profile, or a file of a tool")
    if path.is_dir():
        own = path / KERNELS
        if own.is_file():
            return of_work(load(own)[1])
        counted = path / NSIGHT
        return nsight.read(counted) if counted.is_file() else rocprof.read(path)
    if not path.is_file():
        raise ProfileError(f"{path} is a pipe or a device: name a file")
    if path.suffix == ".db":
        return rocprof.database(path)
    if path.suffix == ".csv":
        return _csv(path)
    if path.name == KERNELS:
        return of_work(load(path)[1])
    if path.suffixes[-2:] in ([".json", ".gz"], [".json"]) or path.suffix == ".json":
        return chrome.read(path)
    raise ProfileError(f"{path}: use a folder, or a file that ends with .csv, .db or .json")


def _csv(path: Path) -> Profile:
    """By its first line: counters of Nsight Compute, a trace, or statistics."""
    if nsight.is_one(path):
        return nsight.read(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline().lower()
    if "start_timestamp" in header and "counter_name" not in header:
        return of_dispatches(rocprof.trace(path), sources=(str(path),))
    if "counter_name" in header:
        return Profile((), counters=tuple(rocprof.counters(path)), sources=(str(path),))
    return Profile(summed(rocprof.stats(path)), sources=(str(path),))


def of_work(work: Iterable[Work]) -> Profile:
    return Profile(summed(Total(one.name, 1, one.seconds) for one in work))


# -- showing --------------------------------------------------------------------------------------


def show(tool: str, way: str, folder: Path, top: int) -> None:
    """Print what a tool found."""
    if tool == "flops":
        flops(json.loads((folder / "flops.json").read_text(encoding="utf-8")))
    elif tool == "memory":
        of_memory(json.loads((folder / "memory.json").read_text(encoding="utf-8")))
    elif tool == "triton":
        of_triton(json.loads((folder / "triton.json").read_text(encoding="utf-8")))
    elif tool == "energy":
        found = json.loads((folder / "energy.json").read_text(encoding="utf-8"))
        print(f"{found['joules_per_sample']:.3g} J a sample, {found['watts']:.0f} W")
    elif way == "torch":
        facts, work = load(folder / KERNELS)
        of_step(facts, work, top)
        print(f"timeline for ui.perfetto.dev: {folder / TRACE}; operators: {folder / TABLE}")
    elif tool in ("hotspots", "counters"):
        totals(read(folder), top)
    else:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(path)


def totals(profile: Profile, top: int) -> None:
    """The slowest kernels and the counters of a profile."""
    out, whole = console(), profile.seconds or 1.0
    table = columns("kernel", "calls", "us", "share")
    for one in profile.totals[:top]:
        table.add_row(
            one.name, f"{one.calls}", f"{one.seconds * 1e6:.1f}", f"{one.seconds / whole:.1%}"
        )
    out.print(table)
    if profile.busy_seconds is not None:
        busy, span = profile.busy_seconds * 1e6, (profile.span_seconds or 0.0) * 1e6
        out.print(f"a kernel runs in {busy:.1f} of {span:.1f} us")
    if profile.counters:
        counted = columns("kernel", "counter", "sum, or mean in %", left=2)
        for counter in sorted(profile.counters, key=lambda one: (one.counter, -one.value)):
            value = f"{counter.value:g} {counter.unit}".rstrip()
            counted.add_row(counter.kernel, counter.counter, value)
        out.print(counted)


def flops(found: dict[str, Any]) -> None:
    out = console()
    table = columns("counted by", "GFLOP a step")
    for name, flop in found["flop"].items():
        table.add_row(name, f"{flop * 1e-9:.2f}")
    out.print(table)
    for name, reason in found["unavailable"].items():
        out.print(f"{name}: {reason}")
    rate, milliseconds = found["product_flops_per_second"], found["step_seconds"] * 1e3
    out.print(
        f"model FLOP utilisation {found['mfu']:.1%}: the model formula in {milliseconds:.2f} ms, "
        f"over {rate * 1e-12:.1f} TFLOP/s of a large product"
    )
    table = columns("op", "GFLOP a step", "share")
    whole = sum(found["by_op"].values())
    for name, flop in sorted(found["by_op"].items(), key=lambda item: -item[1]):
        table.add_row(name, f"{flop * 1e-9:.2f}", f"{flop / whole:.1%}")
    out.print(table)


def of_ops(found: Sequence[dict[str, Any]]) -> None:
    out = console()
    table = columns(
        "op", "pass", "Triton us", "PyTorch us", "speed-up", "GB/s", "max error", left=2
    )
    for one in found:
        error = f"{one['max_error']:.2e}"
        for name, times in one.get("passes", {"": None}).items():
            if times is None:
                table.add_row(one["op"], name, "-", "-", "-", "-", error)
                continue
            micros = [f"{times[key] * 1e6:.1f}" for key in ("seconds", "other_seconds")]
            rate = f"{times['bytes_per_second'] * 1e-9:.0f}"
            table.add_row(one["op"], name, *micros, f"{times['speedup']:.2f}x", rate, error)
    out.print(table)
    for reason in sorted({one["unavailable"] for one in found if "unavailable" in one}):
        out.print(f"not timed: {reason}")


def of_triton(found: dict[str, Any]) -> None:
    """The ops, and RMSNorm by the size of its block."""
    of_ops(found["ops"])
    out = console()
    if reason := found.get("block_sizes_unavailable"):
        out.print(reason)
        return
    headings, *rows = found["block_sizes"]
    study = columns(*headings)
    for row in rows:
        study.add_row(*row)
    out.print("RMSNorm by the size of its block, 1024 rows of 2048 in float32:")
    out.print(study)


def of_memory(found: dict[str, Any]) -> None:
    out, whole = console(), found["peak_bytes"]
    table = columns("at the peak", "MiB", "share")
    for name, size in found["at_peak_bytes"].items():
        table.add_row(name, f"{size / 2**20:.1f}", f"{size / whole:.1%}")
    out.print(table)
    out.print(f"the peak, {whole / 2**20:.1f} MiB, is in the {found['peak_phase']} pass")


def changes(found: Sequence[Change], before: Profile, after: Profile, top: int) -> None:
    """The kernels of two profiles, the largest change of time first."""
    out = console()
    table = columns("kernel", "", "calls before", "after", "us before", "after", left=2)
    for change in found[:top]:
        sides = (change.before, change.after)
        calls = [f"{one.calls}" if one else "-" for one in sides]
        micros = [f"{one.seconds * 1e6:.1f}" if one else "-" for one in sides]
        table.add_row(change.name, change.kind, *calls, *micros)
    out.print(table)
    if len(found) > top:
        out.print(f"... {len(found) - top} more: --top {len(found)}")
    out.print(
        f"{before.calls} launches in {before.seconds * 1e6:.1f} us before, "
        f"{after.calls} in {after.seconds * 1e6:.1f} us after"
    )
