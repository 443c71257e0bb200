"""Which kernels of a slower benchmark moved: profiles and compiled resources of both sides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

SHARE = 0.1  # of the whole change: a kernel that makes less of it is not named
MOST = 5


def moved(base: Sequence[dict[str, Any]], candidate: Sequence[dict[str, Any]]) -> list[str]:
    """Lines, the largest change first.

    Each side gives profiles: ``kernels`` by name (launches, seconds), ``resources`` by name.
    """
    before, after = _kernels(base), _kernels(candidate)
    changes = {
        name: after.get(name, (0, 0.0))[1] - before.get(name, (0, 0.0))[1]
        for name in {**before, **after}
    }
    whole = sum(abs(change) for change in changes.values())
    lines = []
    for name in sorted(changes, key=lambda name: -abs(changes[name]))[:MOST]:
        if abs(changes[name]) >= SHARE * whole > 0:
            lines.append(f"{name}: {_times(before.get(name))} -> {_times(after.get(name))}")
    lines += _resources(base[-1]["resources"], candidate[-1]["resources"])
    return lines or ["no kernel takes longer in a profile: the time is between them"]


def _kernels(profiles: Sequence[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Of each kernel its launches and the median of its seconds."""
    names = {name for profile in profiles for name in profile["kernels"]}
    found = {}
    for name in sorted(names):
        seen = [profile["kernels"].get(name, (0, 0.0)) for profile in profiles]
        found[name] = (
            max(count for count, _ in seen),
            statistics.median(seconds for _, seconds in seen),
        )
    return found


def _times(kernel: tuple[int, float] | None) -> str:
    if kernel is None or not kernel[0]:
        return "not launched"
    return f"{kernel[1] * 1e6:.1f} us in {kernel[0]}"


def _resources(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    lines = []
    for name in {**before, **after}:
        then, now = before.get(name, {}), after.get(name, {})
        changed = [
            f"{field} {then.get(field)} -> {now.get(field)}"
            for field in {**then, **now}
            if then.get(field) != now.get(field)
        ]
        if changed and then and now:
            lines.append(f"{name}: {', '.join(changed)}")
    return lines
