"""What a profile says of a program's kernels, whichever tool wrote it, in whole nanoseconds."""

from collections.abc import Iterable
from dataclasses import dataclass

from tinyllama.harness.machine.errors import UsageError


class ProfileError(UsageError):
    """A profile that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Total:
    """All launches of one kernel."""

    name: str
    calls: int
    nanoseconds: int


@dataclass(frozen=True)
class Counter:
    """A hardware counter of one kernel: its sum over the launches, or of a share in % the mean."""

    kernel: str
    counter: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class Profile:
    """The kernels of one profiled program, the slowest first. Those that overlap count twice."""

    totals: tuple[Total, ...]
    counters: tuple[Counter, ...] = ()

    @classmethod
    def of(cls, totals: Iterable[Total], counters: Iterable[Counter] = ()) -> "Profile":
        """Make a profile from totals, of which several may have one name."""
        by_name: dict[str, Total] = {}
        for total in totals:
            before = by_name.get(total.name, Total(total.name, 0, 0))
            by_name[total.name] = Total(
                total.name, before.calls + total.calls, before.nanoseconds + total.nanoseconds
            )
        slowest = sorted(by_name.values(), key=lambda total: (-total.nanoseconds, total.name))
        return cls(tuple(slowest), tuple(counters))

    @property
    def summary(self) -> str:
        microseconds = sum(total.nanoseconds for total in self.totals) / 1e3
        return f"{sum(total.calls for total in self.totals)} launches in {microseconds:.1f} us"
