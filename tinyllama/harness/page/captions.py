"""What a plot shows, in a sentence computed from the records it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllama.harness.page import numbers
from tinyllama.harness.page.numbers import listed, milliseconds, percent, significant
from tinyllama.harness.page.select import Entry, fastest, measured
from tinyllama.harness.records.results import Record


def ladder(found: Sequence[Entry]) -> str:
    """The fastest tier, against V1, the floor and the fastest peer."""
    tier, peer = fastest(found, "tier"), fastest(found, "peer")
    if tier is None:
        return "No tier ran."
    text = f"{tier['contender']} is the fastest tier: {milliseconds(tier['seconds'])} ms a step"
    if "over_v1" in tier and tier["contender"] != "v1":
        text += f", {numbers.times(tier['over_v1'])} as fast as v1"
    if "floor_share" in tier:
        share = tier["floor_share"]
        text += f"; the floor would take {percent(share[0])}% of that"
        text += f" {numbers.interval(share, 100)}"
    text += "."
    if peer:
        text += f" Fastest peer: {peer['contender']}, {milliseconds(peer['seconds'])} ms."
    return text


def roofline(found: Sequence[Entry]) -> str:
    """Which of ours come nearest to and stay farthest from the ceilings; after the pass's name."""
    ours = [e for e in found if "roofline_share" in e and e["role"] == "ours"]
    if not ours:
        return "."
    best = max(ours, key=lambda entry: float(entry["roofline_share"]))
    worst = min(ours, key=lambda entry: float(entry["roofline_share"]))
    text = f": {_op(best)} comes nearest to its ceiling, {percent(best['roofline_share'])}%"
    if worst is not best:
        text += f"; {_op(worst)} stays farthest from it, {percent(worst['roofline_share'])}%"
    return f"{text}."


def _op(entry: Entry) -> str:
    return f"{entry['op']} by {entry['provider']}"


def sweep(found: Sequence[Entry], axis: str, field: str) -> str:
    """What each contender takes at the far end, and which ends before it."""
    far = max(entry[axis] for entry in found)
    show = milliseconds if field == "seconds" else numbers.mebibytes
    unit = "ms" if field == "seconds" else "MiB"
    letter = "T" if axis == "seq_len" else "B"
    there = {e["contender"]: e for e in found if e[axis] == far}
    ordered = sorted(there.items(), key=lambda item: float(item[1][field]))
    values = listed([f"{name} {show(entry[field])}" for name, entry in ordered])
    text = f"At {letter} = {far:,}: {values} {unit}."
    for name in dict.fromkeys(e["contender"] for e in found if e["contender"] not in there):
        last = max(e[axis] for e in found if e["contender"] == name)
        text += f" {name} ends at {last:,}."
    return text


def parts(found: Sequence[Entry]) -> str:
    """The largest part of the fastest tier's step, and who waits most."""
    tier = fastest(found, "tier")
    text = ""
    if tier and tier.get("time_by"):
        name = max(tier["time_by"], key=lambda part: tier["time_by"][part])
        share = tier["time_by"][name] / tier["seconds"]
        text = f"{tier['contender']} spends most on {name}: {percent(share)}% of its step. "
    waiting = [(idle(entry) / entry["seconds"], entry["contender"]) for entry in measured(found)]
    share, contender = max(waiting)
    return text + f"Most idle: {contender}, {percent(share)}% of its step without a kernel."


def idle(entry: Entry) -> float:
    """Seconds of a step in which no kernel ran; zero where that was not measured."""
    return max(0.0, float(entry["seconds"] - entry.get("busy_seconds", entry["seconds"])))


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


def ceilings(found: Sequence[Entry]) -> list[str]:
    """The ceilings of a record in words."""
    words = []
    for entry in found:
        name = entry["name"].partition("/")[2].replace("product-", "products, ")
        if "bytes_per_second" in entry:
            words.append(f"{name} {significant(entry['bytes_per_second'] / 1e12)} TB/s")
        if "flops_per_second" in entry:
            words.append(f"{name} {significant(entry['flops_per_second'] / 1e12)} TFLOP/s")
    return words
