"""Tables of a page: columns declared as data, empty ones dropped. No HTML."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinyllama.harness.page.svg import Key
from tinyllama.harness.records import numbers
from tinyllama.harness.records.entries import Entry, Ratio
from tinyllama.harness.records.numbers import MISSING

E = TypeVar("E", bound=Entry)


@dataclass(frozen=True)
class Cell:
    """text, and beneath it a note in small print; share: of 1, drawn as a bar behind.

    key: of whom the text names. href: where the text leads. boxes: a picture in the cell's place,
    lines of (left, width, middle) in percent.
    """

    text: str
    note: str = ""
    share: float | None = None
    key: Key | None = None
    href: str = ""
    boxes: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Header:
    """words: what stands beneath is text, set to the left."""

    name: str
    unit: str = ""
    meaning: str = ""
    words: bool = False


@dataclass(frozen=True)
class Row:
    """cells: the first names the row; reason: why the rest of the cells do not exist. ident: by
    which a link finds it."""

    cells: tuple[Cell, ...]
    reason: str = ""
    strong: bool = False
    ident: str = ""


@dataclass(frozen=True)
class Table:
    caption: str
    headers: tuple[Header, ...]
    rows: tuple[Row, ...]
    folded: bool = False


def ratio(value: Ratio | None, scale: float = 1.0) -> Cell:
    """A ratio with its 99% interval, without where it is over itself."""
    if value is None:
        return Cell(MISSING)
    edges = numbers.interval(value, scale) if value.low != value.high else ""
    return Cell(numbers.significant(value.median * scale), edges)


def texts(
    caption: str, names: Sequence[str], rows: Iterable[Sequence[str]], folded: bool = False
) -> Table:
    """A table of words."""
    headers = tuple(Header(name, words=True) for name in names)
    return Table(caption, headers, tuple(Row(tuple(map(Cell, row))) for row in rows), folded)


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


def column(
    name: str,
    field: str,
    unit: str = "",
    scale: float = 1.0,
    meaning: str = "",
    *,
    note: str = "",
    bar: bool = False,
) -> Column[Any]:
    """A column of a field: a text; a ratio with its 99% interval, without where it is over itself;
    a count; or a figure times ``scale`` with its quartiles where they are recorded.

    note: of a text, the field of the small print. bar: the figure is a share, drawn behind it.
    """

    def cell(entry: Entry) -> Cell | None:
        value = getattr(entry, field)
        if value is None:
            return None
        if isinstance(value, str):
            return Cell(value, (getattr(entry, note) or "") if note else "")
        if isinstance(value, Ratio):
            return ratio(value, scale)
        if isinstance(value, int) and scale == 1:
            return Cell(numbers.whole(value))
        quartiles = getattr(entry, f"{field}_quartiles", None) or ()
        edges = "–".join(numbers.significant(edge * scale) for edge in quartiles)
        return Cell(numbers.significant(value * scale), edges, value if bar else None)

    return Column(Header(name, unit, meaning), cell)


def words(name: str, field: str, note: str = "") -> Column[Any]:
    """A column of text, set to the left."""
    return Column(Header(name, words=True), column(name, field, note=note).cell)
