"""Tables of a page: columns declared as data, empty ones dropped. No HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinyllama.harness.records import numbers
from tinyllama.harness.records.entries import Entry
from tinyllama.harness.records.numbers import MISSING

E = TypeVar("E", bound=Entry)


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
class Column(Generic[E]):
    """A header and how an entry fills it; None where it cannot."""

    header: Header
    cell: Callable[[E], Cell | None]


def table(
    caption: str,
    columns: Sequence[Column[E]],
    found: Sequence[E],
    *,
    folded: bool = False,
    strong: Callable[[E], bool] = lambda entry: False,
) -> Table:
    """A row for each entry, in that order; a column only where some entry fills it."""
    kept = [columns[0], *(c for c in columns[1:] if any(_fill(c, entry) for entry in found))]
    rows = []
    for entry in found:
        if entry.cannot is not None:
            name = columns[0].cell(entry) or Cell(MISSING)
            rows.append(Row((name,), f"cannot run: {entry.cannot}"))
        else:
            cells = (_fill(column, entry) or Cell(MISSING) for column in kept)
            rows.append(Row(tuple(cells), strong=strong(entry)))
    return Table(caption, tuple(column.header for column in kept), tuple(rows), folded)


def absent(columns: Sequence[Column[E]], found: Iterable[E]) -> list[str]:
    """The names of the columns that no entry fills."""
    kept = list(found)
    return [c.header.name for c in columns if not any(_fill(c, entry) for entry in kept)]


def _fill(column: Column[E], entry: E) -> Cell | None:
    return None if entry.cannot is not None else column.cell(entry)


def number(
    name: str,
    field: str,
    unit: str = "",
    scale: float = 1.0,
    meaning: str = "",
    *,
    bar: bool = False,
) -> Column[Any]:
    """A column of a number times ``scale``, with its quartiles where they are recorded."""

    def cell(entry: Entry) -> Cell | None:
        value = getattr(entry, field)
        if value is None:
            return None
        quartiles = getattr(entry, f"{field}_quartiles", None)
        note = ""
        if quartiles:
            note = "–".join(numbers.significant(edge * scale) for edge in quartiles)
        return Cell(numbers.significant(value * scale), note, value if bar else None)

    return Column(Header(name, unit, meaning), cell)


def count(name: str, field: str, meaning: str = "") -> Column[Any]:
    """A column of a whole number."""

    def cell(entry: Entry) -> Cell | None:
        value = getattr(entry, field)
        return None if value is None else Cell(numbers.whole(value))

    return Column(Header(name, "", meaning), cell)


def ratio(name: str, field: str, unit: str, scale: float = 1.0, meaning: str = "") -> Column[Any]:
    """A column of a ratio with its 99% interval; exactly 1 is a contender over itself."""

    def cell(entry: Entry) -> Cell | None:
        value = getattr(entry, field)
        if value is None:
            return None
        if value[0] == value[1] == value[2]:
            return Cell(numbers.significant(value[0] * scale))
        return Cell(numbers.significant(value[0] * scale), numbers.interval(value, scale))

    return Column(Header(name, unit, meaning), cell)


def words(name: str, field: str, meaning: str = "", note: str = "") -> Column[Any]:
    """A column of text; note: the field of the small print."""

    def cell(entry: Entry) -> Cell | None:
        text = getattr(entry, field)
        small = getattr(entry, note) if note else None
        return None if text is None else Cell(str(text), "" if small is None else str(small))

    return Column(Header(name, "", meaning, words=True), cell)
