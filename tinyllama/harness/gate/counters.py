"""Figures without noise, which are compared exactly: memory, kernels, copies, synchronisations.

Times of imports and first calls are noisy and read a few times a side, so they have wide margins.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE
from tinyllama.harness.records.results import is_number
from tinyllama.harness.records.verdict import Figure, Outcome

# Both sides compile at once on one machine, and a single reading of each is off by some tenths.
RATIO, COLD_SECONDS = 1.5, 2.0
FIRST_CALL_SECONDS = 0.5  # instead, with compiled code at hand

# Every benchmark has these on a GPU.
COUNTED_ON_GPU = ("peak_bytes", "kernels", "copies", "host_syncs")


def count_figures(
    base: Mapping[str, int],
    candidate: Mapping[str, int],
    accepted: Callable[[str], float],
    required: Sequence[str] = (),
) -> list[Figure]:
    """SLOWER for more than the base plus what is accepted; FASTER for less than the base.

    accepted: metric -> by how many the base may be exceeded. required: the metrics that both sides
    must have. A side without launches and copies was not profiled: MISSING.
    """
    figures = [
        _count(metric, base.get(metric), candidate.get(metric), accepted(metric))
        for metric in {**dict.fromkeys(required), **base, **candidate}
    ]
    profiled = [any(side.get(m) for m in ("kernels", "copies")) for side in (base, candidate)]
    if all(profiled) or "kernels" not in required:
        return figures
    text = "the profiler saw no launch and no copy of a side: may this device be profiled?"
    blind = Figure("kernels", Outcome.MISSING, text)
    return [*(f for f in figures if f.metric not in ("kernels", "copies", "host_syncs")), blind]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(metric: str, before: Any, after: Any, accepted: float) -> Figure:
    if not (_is_count(before) and _is_count(after)):
        text = f"{metric} was {before}, is {after}: it was not read on both sides"
        return Figure(metric, Outcome.MISSING, text, before, after)
    text = f"{metric} {before:,} -> {after:,}"
    outcome = Outcome.SAME
    if after > before + accepted:
        outcome = Outcome.SLOWER
    elif after < before:
        outcome = Outcome.FASTER
    if accepted and after > before:
        text += f", {accepted:,} more accepted"
    return Figure(metric, outcome, text, before, after, after / before if before else None)


def seconds_figure(
    metric: str, seconds: Mapping[str, float], accepted: float, more: float
) -> Figure:
    """Of noisy seconds by side, as of a first call: SLOWER beyond a ratio plus ``more`` seconds.
    accepted: how many seconds beyond that."""
    before, after = seconds[BASE], seconds[CANDIDATE]
    if not all(is_number(value) and value > 0 for value in (before, after)):
        text = f"{metric} was {before}, is {after}: invalid times"
        return Figure(metric, Outcome.MISSING, text, before, after)
    limit = before * RATIO + more + accepted
    outcome, text = Outcome.SAME, f"{metric} {before:.2f} -> {after:.2f} s"
    if after > limit:
        outcome, text = Outcome.SLOWER, f"{text}, allowed {limit:.2f}"
    return Figure(metric, outcome, text, before, after, after / before)
