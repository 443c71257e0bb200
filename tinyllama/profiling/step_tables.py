"""What a profile of PyTorch says of one training step, as tables in a terminal."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.table import Table

from tinyllama.harness.measure.launches import covered, kind_of
from tinyllama.harness.report.tables import console
from tinyllama.profiling import rates
from tinyllama.profiling.ranges import UNKNOWN, Work

K = TypeVar("K")
MOST_UNMAPPED = 0.01  # share of the time that may belong to no op


def columns(*names: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(names):
        if place < left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def show(facts: dict[str, Any], work: Sequence[Work], top: int) -> None:
    """The slowest kernels with their ops, and the time by op and by kind."""
    out, gpu = console(), facts["device"] != "cpu"
    unit = "kernel" if gpu else "operator"
    whole = _seconds(work) or 1.0
    slowest = _slowest(work, lambda one: (one.name, op_of(one)))
    table = columns(unit, "op", "layers", "calls", "us", "share", left=3)
    for (name, op), own in slowest[:top]:
        table.add_row(name, op, layers_of(own), *_figures(own, whole))
    out.print(table)
    if len(slowest) > top:
        out.print(f"... {len(slowest) - top} more: --top {len(slowest)}")
    out.print(_by("op", work, op_of, whole))
    kinds = _by("kind", work, lambda one: kind_of(one.name), whole)
    if spans := spans_of(facts):
        gaps = _length(spans) - covered(spans)
        kinds.add_row("no kernel", "", f"{gaps * 1e6:.1f}", f"{gaps / whole:.1%}")
    out.print(kinds)
    took = {name: _seconds(own) for name, own in _slowest(work, op_of)}
    cost = {name: rates.Cost(**each) for name, each in facts["costs"].items()}
    out.print(rates.table(columns, took, cost, facts["ceilings"]))
    lost = _seconds(one for one in work if one.op == UNKNOWN) / whole
    if lost > MOST_UNMAPPED:
        out.print(f"{lost:.1%} of the time belongs to no op: see {UNKNOWN!r} above")
    per_step = f"{len(work)} {unit}s a step, {whole * 1e6:.0f} us in them"
    out.print(f"plan {facts['plan']}: {per_step}")
    if spans:
        at_once = sum(end - start for start, end in spans) - covered(spans)
        busy = f"a kernel runs in {covered(spans) * 1e6:.0f} of {_length(spans) * 1e6:.0f} us"
        out.print(f"{busy}; {at_once * 1e6:.0f} us are of kernels that overlap others")
        if alone := facts.get("unprofiled_seconds"):
            out.print(f"without the profiler the host waits {alone * 1e6:.0f} us for a step")
    for number, (saves, text) in enumerate(advice(facts, work), 1):
        out.print(f"{number}. {text} ({saves * 1e6:.0f} us, {saves / whole:.0%} of that time)")


def op_of(one: Work) -> str:
    """The op without its layer, and whether it is its backward pass."""
    op = one.op.rpartition(".")[2]
    return op + rates.BACKWARD if one.backward else op


def layers_of(work: Iterable[Work]) -> str:
    """The layers that work belongs to, as in ``0-7``; empty for what is in none."""
    found = sorted({int(part) for one in work for part in one.op.split(".") if part.isdigit()})
    if not found:
        return ""
    whole = found == list(range(found[0], found[-1] + 1))
    return f"{found[0]}-{found[-1]}" if whole and len(found) > 1 else ", ".join(map(str, found))


def _seconds(work: Iterable[Work]) -> float:
    return sum(one.seconds for one in work)


def _slowest(work: Iterable[Work], key: Callable[[Work], K]) -> list[tuple[K, list[Work]]]:
    """The work of each key, the slowest first."""
    found: dict[K, list[Work]] = {}
    for one in work:
        found.setdefault(key(one), []).append(one)
    return sorted(found.items(), key=lambda item: -_seconds(item[1]))


def _figures(work: Sequence[Work], whole: float) -> tuple[str, str, str]:
    took = _seconds(work)
    return f"{len(work)}", f"{took * 1e6:.1f}", f"{took / whole:.1%}"


def _by(title: str, work: Sequence[Work], key: Callable[[Work], str], whole: float) -> Table:
    table = columns(title, "calls", "us", "share")
    for name, own in _slowest(work, key):
        table.add_row(name, *_figures(own, whole))
    return table


def spans_of(facts: dict[str, Any]) -> list[tuple[float, float]]:
    """Start and end of each kernel in seconds; none on a CPU."""
    return [(start * 1e-6, end * 1e-6) for start, end, _ in facts["spans_us"]]


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds from the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


def advice(facts: dict[str, Any], work: Sequence[Work]) -> list[tuple[float, str]]:
    """The three things worth doing next: the seconds that each is about, and what to do."""
    spans = spans_of(facts)
    ways: list[tuple[float, str]] = []
    if spans:
        idle = _length(spans) - covered(spans)
        why = "the step is captured: fewer, larger kernels" if facts["captured"] else "capture it"
        ways.append((idle, f"no kernel runs between kernels: {why}"))
    said = {
        "copies": "copies: keep tensors contiguous, or let kernels read strides",
        "elementwise": "work bound by memory: fuse it with its neighbours",
        "attention": "attention: use a kernel that stores no scores",
        "optimizer": "the optimizer: update all parameters in one launch",
        "products": "products: use a lower precision, or remove those that are not needed",
    }
    by_kind = _slowest(work, lambda one: kind_of(one.name))
    ways += [(_seconds(own), said[kind]) for kind, own in by_kind if kind in said]
    return sorted(ways, reverse=True)[:3]
