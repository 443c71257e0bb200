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
    """The kernels of one profiled program, the slowest first."""

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
    def calls(self) -> int:
        return sum(total.calls for total in self.totals)

    @property
    def nanoseconds(self) -> int:
        """The time of all kernels; those that overlap count twice."""
        return sum(total.nanoseconds for total in self.totals)


@dataclass(frozen=True)
class Change:
    """A kernel in two profiles; None on the side that lacks it."""

    name: str
    before: Total | None
    after: Total | None

    @property
    def nanoseconds(self) -> int:
        """How much more time the second profile takes."""
        before, after = (total.nanoseconds if total else 0 for total in (self.before, self.after))
        return after - before

    @property
    def kind(self) -> str:
        if self.before is None:
            return "appeared"
        return "vanished" if self.after is None else "moved"


def compare(before: Profile, after: Profile) -> list[Change]:
    """List every kernel of either profile, the largest change of time first."""
    first = {total.name: total for total in before.totals}
    second = {total.name: total for total in after.totals}
    changes = [Change(name, first.get(name), second.get(name)) for name in {**first, **second}]
    return sorted(changes, key=lambda change: (-abs(change.nanoseconds), change.name))
