"""Tables of a page: columns declared as data, empty ones dropped. No HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllama.harness.page import numbers
from tinyllama.harness.page.numbers import MISSING

Entry = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """text, and beneath it a note in small print; share: of 1, drawn as a bar behind."""

    text: str
    note: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Header:
    """words: what stands beneath is text, set to the left."""

    name: str
    unit: str = ""
    meaning: str = ""
    words: bool = False


@dataclass(frozen=True)
class Row:
    """cells: the first names the row; reason: why the rest of the cells do not exist."""

    cells: tuple[Cell, ...]
    reason: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    caption: str
    headers: tuple[Header, ...]
    rows: tuple[Row, ...]
    folded: bool = False


@dataclass(frozen=True)
class Column:
    """A header and how an entry fills it; None where it cannot."""

    header: Header
    cell: Callable[[Entry], Cell | None]


def table(
    caption: str,
    columns: Sequence[Column],
    found: Sequence[Entry],
    *,
    folded: bool = False,
    strong: Callable[[Entry], bool] = lambda entry: False,
) -> Table:
    """A row for each entry, in that order; a column only where some entry fills it."""
    kept = [columns[0], *(c for c in columns[1:] if any(_fill(c, entry) for entry in found))]
    rows = []
    for entry in found:
        if "cannot" in entry:
            name = columns[0].cell(entry) or Cell(MISSING)
            rows.append(Row((name,), f"cannot run: {entry['cannot']}"))
        else:
            cells = (_fill(column, entry) or Cell(MISSING) for column in kept)
            rows.append(Row(tuple(cells), strong=strong(entry)))
    return Table(caption, tuple(column.header for column in kept), tuple(rows), folded)


def absent(columns: Sequence[Column], found: Iterable[Entry]) -> list[str]:
    """The names of the columns that no entry fills."""
    ran = [entry for entry in found if "cannot" not in entry]
    return [c.header.name for c in columns if not any(_fill(c, entry) for entry in ran)]


def _fill(column: Column, entry: Entry) -> Cell | None:
    return None if "cannot" in entry else column.cell(entry)


def number(
    name: str,
    field: str,
    unit: str = "",
    scale: float = 1.0,
    meaning: str = "",
    *,
    bar: bool = False,
) -> Column:
    """A column of a number times ``scale``, with its quartiles where they are recorded."""

    def cell(entry: Entry) -> Cell | None:
        value = entry.get(field)
        if value is None:
            return None
        quartiles = entry.get(f"{field}_quartiles")
        note = ""
        if quartiles:
            note = "–".join(numbers.significant(edge * scale) for edge in quartiles)
        return Cell(numbers.significant(value * scale), note, value if bar else None)

    return Column(Header(name, unit, meaning), cell)


def count(name: str, field: str, meaning: str = "") -> Column:
    """A column of a whole number."""

    def cell(entry: Entry) -> Cell | None:
        value = entry.get(field)
        return None if value is None else Cell(numbers.whole(value))

    return Column(Header(name, "", meaning), cell)


def ratio(name: str, field: str, unit: str, scale: float = 1.0, meaning: str = "") -> Column:
    """A column of a ratio with its 99% interval; exactly 1 is a contender over itself."""

    def cell(entry: Entry) -> Cell | None:
        value = entry.get(field)
        if value is None:
            return None
        if value[0] == value[1] == value[2]:
            return Cell(numbers.significant(value[0] * scale))
        return Cell(numbers.significant(value[0] * scale), numbers.interval(value, scale))

    return Column(Header(name, unit, meaning), cell)


def words(name: str, field: str, meaning: str = "", note: str = "") -> Column:
    """A column of text; note: the field of the small print."""

    def cell(entry: Entry) -> Cell | None:
        text = entry.get(field)
        return None if text is None else Cell(str(text), str(entry.get(note, "")))

    return Column(Header(name, "", meaning, words=True), cell)
