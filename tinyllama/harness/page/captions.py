"""What a plot shows, in a sentence computed from its records."""

from collections.abc import Sequence

from tinyllama.harness.page.select import fastest, measured
from tinyllama.harness.records import numbers
from tinyllama.harness.records.entries import CeilingEntry, OpEntry, StepEntry, SweepEntry
from tinyllama.harness.records.numbers import listed, milliseconds, percent, significant
from tinyllama.harness.records.results import Record


def ladder(found: Sequence[StepEntry]) -> str:
    """The fastest tier, against the baseline, the floor and the fastest peer."""
    tier, peer = fastest(found, "tier"), fastest(found, "peer")
    if tier is None:
        return "No tier ran."
    text = f"{tier.contender} is the fastest tier: {milliseconds(tier.time)} ms a step"
    if tier.over_baseline and tier.contender != tier.baseline:
        text += f", {numbers.times(tier.over_baseline)} as fast as {tier.baseline}"
    if tier.floor_share:
        text += f"; the floor would take {percent(tier.floor_share.median)}% of that"
        text += f" {numbers.interval(tier.floor_share, 100)}"
    text += "."
    if peer:
        text += f" Fastest peer: {peer.contender}, {milliseconds(peer.time)} ms."
    return text


def roofline(found: Sequence[OpEntry]) -> str:
    """Which of our providers reach most and least of their ceiling. It follows the pass's name."""
    shares = [(e.roofline_share, e) for e in found if e.roofline_share and e.role == "ours"]
    if not shares:
        return "."
    least, worst = min(shares, key=lambda pair: pair[0])
    most, best = max(shares, key=lambda pair: pair[0])
    text = f": {_op(best)} comes nearest to its ceiling, {percent(most)}%"
    if worst is not best:
        text += f"; {_op(worst)} stays farthest from it, {percent(least)}%"
    return f"{text}."


def _op(entry: OpEntry) -> str:
    return f"{entry.op} by {entry.provider}"


def sweep(found: Sequence[SweepEntry], axis: str, field: str) -> str:
    """What each contender takes at the far end, and which contenders end before it."""
    far = max(getattr(entry, axis) for entry in found)
    show = milliseconds if field == "seconds" else numbers.mebibytes
    unit = "ms" if field == "seconds" else "MiB"
    letter = "T" if axis == "seq_len" else "B"
    there = {e.contender: getattr(e, field) for e in found if getattr(e, axis) == far}
    ordered = sorted(there.items(), key=lambda item: float(item[1]))
    values = listed([f"{name} {show(value)}" for name, value in ordered])
    text = f"At {letter} = {far:,}: {values} {unit}."
    for name in dict.fromkeys(e.contender for e in found if e.contender not in there):
        last = max(getattr(e, axis) for e in found if e.contender == name)
        text += f" {name} ends at {last:,}."
    return text


def parts(found: Sequence[StepEntry]) -> str:
    """The largest part of the fastest tier's step, and the contender that is idle most."""
    tier = fastest(found, "tier")
    text = ""
    if tier and tier.time_by:
        name, most = max(tier.time_by.items(), key=lambda item: item[1])
        share = percent(most / tier.time)
        text = f"{tier.contender} spends most on {name}: {share}% of its step."
    known = [entry for entry in measured(found) if entry.busy_seconds is not None]
    waiting = [(idle(entry) / entry.time, entry.contender) for entry in known]
    if waiting:
        most, contender = max(waiting)
        text += f" Most idle: {contender}, {percent(most)}% of its step without a kernel."
    return text.strip()


def idle(entry: StepEntry) -> float:
    """Seconds of a step in which no kernel ran; zero where that was not measured."""
    return 0.0 if entry.busy_seconds is None else max(0.0, entry.time - entry.busy_seconds)


def history(runs: Sequence[Record], times: dict[str, list[float]]) -> str:
    """First and last time of each tier; two runs, so no ratio of them."""
    spans = [
        f"{name} {milliseconds(found[0])} ms, then {milliseconds(found[-1])} ms"
        for name, found in times.items()
        if len(found) > 1
    ]
    first, last = runs[0].date[:10], runs[-1].date[:10]
    text = f"{len(runs)} runs, {first} to {last}" if first != last else f"{len(runs)} runs, {first}"
    return f"{text}: {listed(spans)}." if spans else f"{text}."


def ceilings(found: Sequence[CeilingEntry]) -> list[str]:
    """The ceilings of a record in words."""
    words = []
    for entry in found:
        name = entry.name.partition("/")[2].replace("product-", "products, ")
        for rate, unit in ((entry.bytes_per_second, "TB/s"), (entry.flops_per_second, "TFLOP/s")):
            words += [f"{name} {significant(rate / 1e12)} {unit}"] if rate is not None else []
    return words
