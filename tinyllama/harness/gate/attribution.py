"""Which kernels of a SLOWER benchmark changed: profiles of both sides."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import scipy

SHARE = 0.1  # of the whole change; a kernel with less is not named
MOST = 5
PROFILES = 9  # of a side: enough for the test although one of them was disturbed
ALPHA = 0.01  # the chance that an equal kernel is named
Profile = Mapping[str, tuple[int, float]]


def moved(base: Sequence[Profile], candidate: Sequence[Profile], *, timed: bool) -> list[str]:
    """Lines, the largest change first; a kernel that became faster is not named.

    Each profile of a side gives, by the name of a kernel, its launches and seconds. timed: whether
    device time is SLOWER; where it is not, only changed launch counts are named.
    """
    before, after = _kernels(base), _kernels(candidate)
    changes = {}
    for name in {**before, **after}:
        then, now = before.get(name, NONE), after.get(name, NONE)
        change = now.median - then.median
        # What became faster explains no slowdown.
        if _differ(then, now, timed) and (change > 0 or not timed):
            changes[name] = change
    total = sum(abs(change) for change in changes.values())
    lines = []
    for name in sorted(changes, key=lambda name: -abs(changes[name]))[:MOST]:
        if abs(changes[name]) >= SHARE * total:
            lines.append(f"{name}: {before.get(name, NONE)} -> {after.get(name, NONE)}")
    if not lines and not timed:
        return ["kernels are launched as often as before"]
    return lines or ["no kernel takes longer in a profile: the time is between them"]


@dataclass(frozen=True)
class _Kernel:
    """A kernel in the profiles of one side: its most launches, and its seconds in each profile."""

    launches: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        if not self.launches:
            return "not called"
        calls = f"{self.launches} calls of" if self.launches > 1 else "a call of"
        return f"{calls} {self.median / self.launches * 1e6:.1f} us"


NONE = _Kernel(0, (0.0,))


def _kernels(profiles: Sequence[Profile]) -> dict[str, _Kernel]:
    kernels = {}
    for name in sorted({name for profile in profiles for name in profile}):
        readings = [profile.get(name, (0, 0.0)) for profile in profiles]
        launches, seconds = zip(*readings, strict=True)
        kernels[name] = _Kernel(max(launches), seconds)
    return kernels


def _differ(before: _Kernel, after: _Kernel, timed: bool) -> bool:
    """Whether its launch count changed, or it takes longer by Mann and Whitney's test."""
    if before.launches != after.launches or not timed:
        return before.launches != after.launches
    test = scipy.stats.mannwhitneyu(
        before.seconds, after.seconds, alternative="less", method="exact"
    )
    return bool(test.pvalue < ALPHA)
