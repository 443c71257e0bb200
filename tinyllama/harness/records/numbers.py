"""Figures as text: three significant digits, the unit in the header of the column."""

import math
from collections.abc import Sequence

MISSING = "–"
MEBIBYTE = 2**20


def significant(value: float) -> str:
    """Three significant digits; an exponent only below 0.001 and from a thousand million on."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    value = float(f"{value:.2e}")
    exponent = math.floor(math.log10(abs(value)))
    if not -3 <= exponent < 9:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - exponent)}f}"


def milliseconds(seconds: float) -> str:
    return significant(seconds * 1e3)


def mebibytes(count: float) -> str:
    return significant(count / MEBIBYTE)


def percent(share: float) -> str:
    """A share, 1 being all, as a percentage without its sign."""
    return significant(share * 100)


def whole(count: float) -> str:
    return f"{count:,.0f}"


def interval(ratio: Sequence[float], scale: float = 1.0) -> str:
    """The 99% interval of a ratio [median, low, high]."""
    return f"[{significant(ratio[1] * scale)}, {significant(ratio[2] * scale)}]"


def times(ratio: Sequence[float]) -> str:
    """A ratio [median, low, high] with its 99% interval."""
    return f"{significant(ratio[0])}× {interval(ratio)}"


def tick(value: float) -> str:
    """A number on an axis, as short as it can be."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            size = 1e3 if letter == "k" else limit
            return f"{value / size:g} {letter}"
    return f"{value:g}"


def listed(words: Sequence[str]) -> str:
    """Words as an enumeration: "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
