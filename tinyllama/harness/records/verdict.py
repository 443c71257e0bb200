"""Whether a record is slower than its baseline: outcomes, and the comparison of two records.

A stored baseline shows only large slowdowns: a threshold of 5% misses half of all slowdowns of 5%,
small ones add up from baseline to baseline, and more rounds do not remove what shifts between two
sessions. For small slowdowns there is the gate, which measures two revisions alternately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyllama.harness.records.entries import Entry, OpEntry
from tinyllama.harness.records.outcome import Outcome as Outcome
from tinyllama.harness.records.outcome import worst as worst
from tinyllama.harness.records.results import Record

# metric -> the ratio to the baseline that is allowed
TOLERANCES = {
    "seconds": 1.05,
    "host_seconds": 1.25,
    "peak_bytes": 1.02,
    "live_bytes": 1.02,
    "kernels": 1.0,
    "copies": 1.0,
    "host_syncs": 1.0,
    "layouts": 1.10,
}


@dataclass(frozen=True)
class Figure:
    """One metric of one entry: its medians before and after, and the outcome."""

    metric: str
    outcome: Outcome
    text: str
    before: Any = None
    after: Any = None
    ratio: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of an entry, or of a whole group with which something is wrong.

    gated: its figures decide; otherwise they are only shown, and the outcome is SAME.
    """

    name: str
    outcome: Outcome
    text: str
    figures: tuple[Figure, ...] = ()
    gated: bool = True

    def __str__(self) -> str:
        return f"{self.outcome.title} {self.name}: {self.text}"


def judge(record: Record, stored: Sequence[Record]) -> list[Verdict]:
    """Compare a record with its baseline among ``stored``, which are oldest first.

    The baseline is the newest complete record of the same group, device and versions from an
    unchanged tree. Without one, the first verdict says why.
    """
    usable = [r for r in stored if r.complete and not r.dirty and r.group == record.group]
    settled = [r for r in usable if r.same_setting(record)]
    if settled:
        return compare(settled[-1], record) or [_nothing(record)]
    return [_no_baseline(record, usable), *unusable(record)]


def unusable(record: Record) -> list[Verdict]:
    """What is wrong without a baseline: a record without figures and without reasons."""
    said = any(entry.cannot or _metrics(entry) for entry in record.entries)
    return [] if said else [_nothing(record)]


def _nothing(record: Record) -> Verdict:
    if any(entry.judged_by_tests for entry in record.entries):
        text = "held by its tests to what the same run measured, and not compared"
        return Verdict(record.group, Outcome.SAME, text, gated=False)
    return Verdict(record.group, Outcome.MISSING, "it measured nothing that can be compared")


def _no_baseline(record: Record, usable: Sequence[Record]) -> Verdict:
    here = [r for r in usable if r.device == record.device]
    if here:
        changed = here[-1].other_versions(record).items()
        words = ", ".join(f"{name} {last} -> {now}" for name, (last, now) in sorted(changed))
        text = f"the baselines are of other versions: {words}"
    elif usable:
        devices = ", ".join(sorted({r.device for r in usable}))
        text = f"the baselines are of other devices: {devices}; this is {record.device}"
    else:
        text = f"no complete record of an unchanged tree on {record.device}"
        return Verdict(record.group, Outcome.NO_BASELINE, text)
    return Verdict(record.group, Outcome.OTHER_DEVICE_OR_VERSION, text)


def compare(baseline: Record, candidate: Record) -> list[Verdict]:
    """A verdict for each entry that either record measured, by name.

    A new entry is NO_BASELINE. One that was measured before and is not now is MISSING. The caller
    checks device and versions.
    """
    before, after = baseline.by_name, candidate.by_name
    verdicts = (_entry(name, before.get(name), after.get(name)) for name in {**before, **after})
    return list(filter(None, verdicts))


def _entry(name: str, before: Entry | None, after: Entry | None) -> Verdict | None:
    """None where there is nothing to compare. An entry that is not gated is SAME, and says so."""
    verdict = _judged(name, before, after)
    reasons = [entry.not_gated for entry in (before, after) if entry]
    if verdict is None or not all(reasons):  # gated in one of the two is gated
        return verdict
    title = "" if verdict.outcome.green else f"{verdict.outcome.title.lower()}: "
    text = f"{reasons[-1]}, not gated: {title}{verdict.text}"
    return Verdict(name, Outcome.SAME, text, verdict.figures, gated=False)


def _judged(name: str, before: Entry | None, after: Entry | None) -> Verdict | None:
    then, now = _metrics(before), _metrics(after)
    if after is None:
        return Verdict(name, Outcome.MISSING, "in the baseline, not in this run") if then else None
    if after.cannot is not None:
        if then:
            text = f"ran in the baseline, not now: {after.cannot}"
            return Verdict(name, Outcome.MISSING, text)
        outcome = Outcome.SAME if before and before.cannot is not None else Outcome.NO_BASELINE
        return Verdict(name, outcome, f"does not run: {after.cannot}")
    if not now and not then:
        return None
    figures = tuple(_figure(m, then.get(m), now.get(m)) for m in {**then, **now})
    outcome = worst(figure.outcome for figure in figures)
    return Verdict(name, outcome, ", ".join(figure.text for figure in figures), figures)


def _metrics(entry: Entry | None) -> dict[str, tuple[float, float, float]]:
    """Of each gated metric of an entry: its median, and low and high; ``layouts`` becomes a metric
    for each layout."""
    if entry is None or entry.cannot is not None:
        return {}
    metrics: dict[str, tuple[float, float, float]] = {}
    for metric in TOLERANCES.keys() - {"layouts"}:
        value = getattr(entry, metric, None)
        if value is not None:
            metrics[metric] = value, *(getattr(entry, f"{metric}_quartiles", None) or [value] * 2)
    for layout, ratio in (entry.layouts or {}).items() if isinstance(entry, OpEntry) else ():
        metrics[f"layouts {layout}"] = ratio
    return metrics


def _figure(
    metric: str, before: tuple[float, ...] | None, after: tuple[float, ...] | None
) -> Figure:
    if after is None:
        return Figure(metric, Outcome.MISSING, f"{metric} is not in this run")
    now, low, high = after
    if before is None:
        return Figure(metric, Outcome.NO_BASELINE, f"{metric} is new", None, now)
    then, then_low, then_high = before
    ratio = now / then if then else float("inf") if now else 1.0
    allowed = TOLERANCES[metric.partition(" ")[0]]
    outcome = Outcome.SAME
    if ratio > allowed:
        outcome = Outcome.SLOWER if low > then_high else Outcome.INCONCLUSIVE
    elif ratio < 1 / allowed and high < then_low:
        outcome = Outcome.FASTER
    text = f"{metric} {ratio:.3f} times"
    if ratio > allowed:
        overlap = "" if outcome is Outcome.SLOWER else ", but the quartiles overlap"
        text += f" ({allowed:g} allowed{overlap})"
    return Figure(metric, outcome, text, then, now, ratio)
