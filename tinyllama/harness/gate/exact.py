"""Figures that have no noise, and are compared exactly: memory, kernels, copies, waits.

The time to compile from a cold cache has some, and one reading a side; it is held to a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.results import is_number
from tinyllama.harness.verdict import Figure, Outcome

# Both sides compile at once on one machine, and a single reading of each is off by some tenths.
COMPILE_RATIO, COMPILE_SECONDS = 1.5, 2.0


def count_figures(
    base: Mapping[str, int], candidate: Mapping[str, int], accepted: Callable[[str], float]
) -> list[Figure]:
    """More than the base, and than what is accepted of it, is SLOWER; less is FASTER."""
    return [
        _count(metric, base.get(metric), candidate.get(metric), accepted(metric))
        for metric in {**base, **candidate}
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(metric: str, before: Any, after: Any, accepted: float) -> Figure:
    if not (_is_count(before) and _is_count(after)):
        text = f"{metric} was {before}, is {after}: it could not be read on both sides"
        return Figure(metric, Outcome.MISSING, text, before, after)
    text = f"{metric} {before:,} -> {after:,}"
    outcome = Outcome.SAME
    if after > before * (1 + accepted):
        outcome = Outcome.SLOWER
    elif after < before:
        outcome = Outcome.FASTER
    if accepted and after > before:
        text += f", {accepted:.1%} accepted"
    return Figure(metric, outcome, text, before, after, after / before if before else None)


def compile_figure(seconds: Mapping[str, float], accepted: Callable[[str], float]) -> Figure:
    """Of the first calls, from cold caches: SLOWER beyond a ratio and some seconds."""
    before, after = seconds[BASE], seconds[CANDIDATE]
    if not all(is_number(value) and value > 0 for value in (before, after)):
        text = f"compile_seconds was {before}, is {after}: no times"
        return Figure("compile_seconds", Outcome.MISSING, text, before, after)
    limit = before * COMPILE_RATIO * (1 + accepted("compile_seconds")) + COMPILE_SECONDS
    text = f"compile_seconds {before:.1f} -> {after:.1f}"
    outcome = Outcome.SAME
    if after > limit:
        outcome, text = Outcome.SLOWER, f"{text}, allowed {limit:.1f}"
    return Figure("compile_seconds", outcome, text, before, after, after / before)
