"""Figures without noise, which are compared exactly: memory, kernels, copies, synchronisations.

The time to compile from a cold cache is noisy and read once a side, so it has a margin. Times on
other layouts of the inputs have a bar, which the candidate must meet, unless the base misses it by
as much.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.results import is_number
from tinyllama.harness.records.verdict import Figure, Outcome

# Both sides compile at once on one machine, and a single reading of each is off by some tenths.
COMPILE_RATIO, COMPILE_SECONDS = 1.5, 2.0

# Every benchmark has these on a GPU.
COUNTED_ON_GPU = ("peak_bytes", "kernels", "copies", "host_syncs")


def count_figures(
    base: Mapping[str, int],
    candidate: Mapping[str, int],
    accepted: Callable[[str], tuple[float, int]],
    required: Sequence[str] = (),
) -> list[Figure]:
    """SLOWER for more than the base plus what is accepted; FASTER for less than the base.

    accepted: metric -> by which share, and by which number, the base may be exceeded. required:
    the metrics that both sides must have. A side without launches and copies was not profiled:
    MISSING.
    """
    figures = [
        _count(metric, base.get(metric), candidate.get(metric), *accepted(metric))
        for metric in {**dict.fromkeys(required), **base, **candidate}
    ]
    profiled = [any(side.get(m) for m in ("kernels", "copies")) for side in (base, candidate)]
    if all(profiled) or "kernels" not in required:
        return figures
    text = "the profiler saw no launch and no copy of a side: may this device be profiled?"
    blind = Figure("kernels", Outcome.MISSING, text)
    return [*(f for f in figures if f.metric not in ("kernels", "copies", "host_syncs")), blind]


def layouts_missed(
    ratios: Mapping[str, Ratio], bars: Mapping[str, float], accepted: float
) -> tuple[str, ...]:
    """The layouts whose ratio is certainly above the bar."""
    missed = (
        layout
        for layout, bar in bars.items()
        if layout in ratios and ratios[layout].low > bar * (1 + accepted)
    )
    return tuple(missed)


def layout_figures(
    ratios: Mapping[str, Ratio],
    bars: Mapping[str, float],
    accepted: float,
    base: Mapping[str, Ratio] | None = None,
) -> list[Figure]:
    """By layout of the inputs, how many times as long a call takes as on contiguous ones: SLOWER
    where that is certainly above the bar, and above what the base takes. accepted: by which share
    the bar may be exceeded. base: the base's ratios of the layouts that the candidate misses."""
    figures = []
    missed = layouts_missed(ratios, bars, accepted)
    for layout, bar in bars.items():
        metric, limit = f"layouts {layout}", bar * (1 + accepted)
        if layout not in ratios:
            figures.append(Figure(metric, Outcome.MISSING, f"{metric}: not measured"))
            continue
        text = f"{metric} {ratios[layout]} times as long as contiguous, allowed {limit:g}"
        outcome = Outcome.SLOWER if layout in missed else Outcome.SAME
        if layout in missed and base is not None and layout in base:
            text = f"{text}; the base takes {base[layout]}"
            if ratios[layout].low <= base[layout].high:
                outcome = Outcome.SAME
        figures.append(Figure(metric, outcome, text, after=ratios[layout].median))
    return figures


def new_figures(seconds: Mapping[str, float], counted: Mapping[str, int]) -> list[Figure]:
    """Figures of a benchmark that the base lacks: they are shown and decide nothing."""
    figures = [
        Figure(metric, Outcome.NEW, f"{metric} {value * 1e6:.1f} us", after=value)
        for metric, value in seconds.items()
    ]
    return figures + [
        Figure(metric, Outcome.NEW, f"{metric} {value:,}", after=value)
        for metric, value in counted.items()
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(metric: str, before: Any, after: Any, share: float, more: int) -> Figure:
    if not (_is_count(before) and _is_count(after)):
        text = f"{metric} was {before}, is {after}: it was not read on both sides"
        return Figure(metric, Outcome.MISSING, text, before, after)
    text = f"{metric} {before:,} -> {after:,}"
    outcome = Outcome.SAME
    if after > before * (1 + share) + more:
        outcome = Outcome.SLOWER
    elif after < before:
        outcome = Outcome.FASTER
    if (share or more) and after > before:
        text += f", {share:.1%} accepted" if share else f", {more:,} more accepted"
    return Figure(metric, outcome, text, before, after, after / before if before else None)


def compile_figure(seconds: Mapping[str, float], accepted: Callable[[str], float]) -> Figure:
    """Of the seconds of the first calls, from cold caches: SLOWER beyond a ratio plus seconds."""
    before, after = seconds[BASE], seconds[CANDIDATE]
    if not all(is_number(value) and value > 0 for value in (before, after)):
        text = f"compile_seconds was {before}, is {after}: invalid times"
        return Figure("compile_seconds", Outcome.MISSING, text, before, after)
    limit = before * COMPILE_RATIO * (1 + accepted("compile_seconds")) + COMPILE_SECONDS
    text = f"compile_seconds {before:.1f} -> {after:.1f}"
    outcome = Outcome.SAME
    if after > limit:
        outcome, text = Outcome.SLOWER, f"{text}, allowed {limit:.1f}"
    return Figure("compile_seconds", outcome, text, before, after, after / before)
