"""Scripts, programs and commands of the published course, and what does their work here."""

from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.machine.parsed import tomllib


@dataclass(frozen=True)
class Row:
    """A table of course.toml, which explains the fields."""

    theirs: str
    ours: str
    leaves: str
    note: str = ""


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROWS = tuple(Row(**table) for table in _TABLES["row"])


def find(name: str) -> list[Row]:
    """The rows about a name, with or without its folder; an exact one alone."""
    script = name.strip().rpartition("/")[2].lower()
    exact = [row for row in ROWS if row.theirs.lower() == script]
    return exact or [row for row in ROWS if script and script in row.theirs.lower()]


def table() -> str:
    """Markdown: every row."""
    lines = ["| in the course | here | what it writes or prints | note |", "|---|---|---|---|"]
    lines += [f"| `{r.theirs}` | `{r.ours}` | {r.leaves} | {r.note} |" for r in ROWS]
    return "\n".join(lines)
