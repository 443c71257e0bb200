"""Charts that are HTML: lengths are percents of the page's own width, text keeps its size."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tinyllama.harness.page.svg import Key
from tinyllama.harness.records.numbers import tick


@dataclass(frozen=True)
class Dot:
    """A mark at ``at``, in percent. aside: in the lower lane."""

    at: float
    key: Key
    tip: str
    aside: bool = False


@dataclass(frozen=True)
class Part:
    """A piece of a stacked bar, ``width`` percent of the whole. colour: a name of the palette."""

    width: float
    colour: str
    tip: str


@dataclass(frozen=True)
class Bar:
    """A row of a chart: its name, its figures as text, and dots or parts."""

    name: str
    figures: str
    dots: tuple[Dot, ...] = ()
    parts: tuple[Part, ...] = ()
    key: Key | None = None


@dataclass(frozen=True)
class Chart:
    """ticks: (percent, text); label: what is shown, in words, for readers who cannot see it."""

    rows: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    unit: str
    label: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale from ``low`` to ``high``."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float]) -> "Scale":
        """A scale with some room at both ends."""
        found = list(values)
        return cls(min(found) / 1.2, max(found) * 1.2)

    def at(self, value: float) -> float:
        """Where a value is, in percent."""
        return 100 * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """1, 2 and 5 of each decade, or the decades alone where there are many."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if self.high / self.low < 1000 else (1,)
        values = [step * 10.0**decade for decade in decades for step in steps]
        inside = [value for value in values if self.low <= value <= self.high]
        return tuple((self.at(value), tick(float(f"{value:.3g}"))) for value in inside)


def shares(whole: float) -> tuple[tuple[float, str], ...]:
    """The ticks of an even scale from 0 to ``whole``, which is 1 or more: 20% of 1, or halves."""
    step = 20 if whole <= 1.2 else 50
    return tuple((each / whole, str(each)) for each in range(0, int(100 * whole) + 1, step))
