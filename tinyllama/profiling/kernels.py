"""What a profile says of a program's kernels, whichever tool wrote it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.launches import covered


class ProfileError(UsageError):
    """A profile that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Dispatch:
    """One launch: start and end in nanoseconds of the tool's clock; ``stream``: the stream, or
    where the tool does not know it the queue."""

    name: str
    start_ns: int
    end_ns: int
    stream: int = 0


@dataclass(frozen=True)
class Total:
    """All launches of one kernel."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Counter:
    """A hardware counter of one kernel: summed over its launches, or of shares in % their mean."""

    kernel: str
    counter: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class Profile:
    """The kernels of one profiled program.

    dispatches: each launch in order of its start, where the tool wrote a trace.
    """

    totals: tuple[Total, ...]
    dispatches: tuple[Dispatch, ...] = ()
    counters: tuple[Counter, ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)

    @property
    def calls(self) -> int:
        return sum(total.calls for total in self.totals)

    @property
    def seconds(self) -> float:
        """Of all kernels; those that overlap count twice."""
        return sum(total.seconds for total in self.totals)

    @property
    def busy_seconds(self) -> float | None:
        """In which at least one kernel ran; None without a trace."""
        if not self.dispatches:
            return None
        return covered((one.start_ns, one.end_ns) for one in self.dispatches) * 1e-9

    @property
    def span_seconds(self) -> float | None:
        """From the first kernel's start to the last one's end; None without a trace."""
        if not self.dispatches:
            return None
        end = max(one.end_ns for one in self.dispatches)
        return (end - min(one.start_ns for one in self.dispatches)) * 1e-9


def of_dispatches(dispatches: Iterable[Dispatch], **rest: object) -> Profile:
    """A profile from its launches."""
    ordered = tuple(sorted(dispatches, key=lambda one: (one.start_ns, one.end_ns)))
    totals = summed(Total(d.name, 1, (d.end_ns - d.start_ns) * 1e-9) for d in ordered)
    return Profile(totals, ordered, **rest)  # type: ignore[arg-type]


def summed(totals: Iterable[Total]) -> tuple[Total, ...]:
    """One total for each name, the slowest first."""
    found: dict[str, Total] = {}
    for one in totals:
        before = found.get(one.name, Total(one.name, 0, 0.0))
        found[one.name] = Total(one.name, before.calls + one.calls, before.seconds + one.seconds)
    return tuple(sorted(found.values(), key=lambda one: (-one.seconds, one.name)))


@dataclass(frozen=True)
class Change:
    """A kernel in two profiles; None on the side that lacks it."""

    name: str
    before: Total | None
    after: Total | None

    @property
    def seconds(self) -> float:
        """What the second profile takes more."""
        before, after = (one.seconds if one else 0.0 for one in (self.before, self.after))
        return after - before

    @property
    def kind(self) -> str:
        if self.before is None:
            return "appeared"
        return "vanished" if self.after is None else "moved"


def compare(before: Profile, after: Profile) -> list[Change]:
    """Every kernel of either profile, the largest change of time first."""
    first = {total.name: total for total in before.totals}
    second = {total.name: total for total in after.totals}
    changes = [Change(name, first.get(name), second.get(name)) for name in {**first, **second}]
    return sorted(changes, key=lambda change: (-abs(change.seconds), change.name))
