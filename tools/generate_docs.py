"""Tables of the documents, written from the code that they describe.

    python -m tools.generate_docs            rewrite them
    python -m tools.generate_docs --check    exit 1 and name those that are stale

A table stands in any ``*.md`` of the root or docs/, between the lines
``<!-- generated: NAME -->`` and ``<!-- end -->``. NAME is a key of `GENERATORS`.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import field.run
from tools import api_page, tables

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"^<!-- generated: (\S+) -->$(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
OPENING = re.compile(r"^<!-- generated:", re.MULTILINE)

GENERATORS: dict[str, Callable[[], str]] = {
    "presets": tables.presets,
    "tiers": tables.tiers,
    "stages": tables.stages,
    "longest": tables.longest,
    "scaling": tables.scaling,
    "expected-scaling": tables.expected_scaling,
    "ladder": tables.ladder,
    "claims": tables.claims,
    "ladder-picture": tables.ladder_picture,
    "released-bugs": tables.released_bugs,
    "versions": tables.versions,
    "ops": tables.ops,
    "bars": tables.bars,
    "curves": tables.curves,
    "field": field.run.tables,
    "api": api_page.names,
    "api-ops": api_page.ops,
}


def documents() -> list[Path]:
    """Every document that may hold tables."""
    folders = (ROOT, ROOT / "docs")
    return [path for folder in folders for path in sorted(folder.glob("*.md"))]


def fill(text: str, document: str) -> tuple[str, list[str]]:
    """The text with its tables made anew, and the names of those that changed.

    Exits with a message for a table that has no generator or no end.
    """
    closed = [match for match in MARKED.finditer(text) if not OPENING.search(match[2])]
    if len(OPENING.findall(text)) != len(closed):
        sys.exit(f"{document}: a generated table has no line `<!-- end -->`: add it")
    stale: list[str] = []

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name not in GENERATORS:
            sys.exit(f"{document}: no generator {name!r}: use one of {', '.join(GENERATORS)}")
        fresh = f"\n\n{GENERATORS[name]()}\n\n"
        if fresh != match[2]:
            stale.append(name)
        return f"<!-- generated: {name} -->{fresh}<!-- end -->"

    return MARKED.sub(filled, text), stale


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of the documents.")
    text = "write nothing; exit 1 if one is stale"
    parser.add_argument("--check", action="store_true", help=text)
    check = parser.parse_args().check
    if not check:
        tables.draw_picture()
    stale_tables = 0
    for path in documents():
        name = str(path.relative_to(ROOT))
        text, stale = fill(path.read_text(encoding="utf-8"), name)
        for table_name in stale:
            print(f"{name}: {table_name} {'is stale' if check else 'rewritten'}")
        if stale and not check:
            path.write_text(text, encoding="utf-8")
        stale_tables += len(stale)
    return int(check and stale_tables > 0)


if __name__ == "__main__":
    sys.exit(main())
