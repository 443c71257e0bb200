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
from tools import (
    api_page,
    claims_table,
    guide_table,
    model_tables,
    plan_tables,
    readme_tables,
    result_figures,
    result_tables,
    stage_table,
)

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"^<!-- generated: (\S+) -->$(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
OPENING = re.compile(r"^<!-- generated:", re.MULTILINE)

GENERATORS: dict[str, Callable[[], str]] = {
    "presets": model_tables.presets,
    "tiers": model_tables.tiers,
    "autocast": model_tables.autocast,
    "step-flops": model_tables.step_flops,
    "guide": guide_table.table,
    "stages": stage_table.table,
    "longest": result_tables.longest,
    "scaling": result_tables.scaling,
    "activations": model_tables.activations,
    "ladder": result_tables.ladder,
    "ladder-picture": result_figures.ladder,
    "released-bugs": readme_tables.released_bugs,
    "versions": readme_tables.versions,
    "ops": result_tables.ops,
    "step-bars": result_tables.step_bars,
    "op-bars": result_tables.op_bars,
    "curves": result_figures.curves,
    "claims-of-v4": claims_table.table,
    "field": field.run.tables,
    "api": api_page.names,
    "api-ops": api_page.ops,
    "plan-errors": plan_tables.errors,
}


class DocumentError(ValueError):
    """A document whose markers cannot be filled; the message names it and the fix."""


def documents() -> list[Path]:
    """Every document that may hold tables."""
    folders = (ROOT, ROOT / "docs")
    return [path for folder in folders for path in sorted(folder.glob("*.md"))]


def fill(text: str, document: str) -> tuple[str, list[str]]:
    """The text with its tables made anew, and the names of those that changed.

    Raises DocumentError for a table that has no generator or no end.
    """
    closed = [found for found in MARKED.finditer(text) if not OPENING.search(found[2])]
    if len(OPENING.findall(text)) != len(closed):
        raise DocumentError(f"{document}: a generated table has no line `<!-- end -->`: add it")
    stale: list[str] = []

    def made(found: re.Match[str]) -> str:
        name = found[1]
        if name not in GENERATORS:
            raise DocumentError(
                f"{document}: no generator {name!r}: use one of {', '.join(GENERATORS)}"
            )
        fresh = f"\n\n{GENERATORS[name]()}\n\n"
        if fresh != found[2]:
            stale.append(name)
        return f"<!-- generated: {name} -->{fresh}<!-- end -->"

    return MARKED.sub(made, text), stale


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of the documents.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if one is stale"
    )
    check = parser.parse_args(argv).check
    failed = False
    if not check:
        result_figures.write()
    for path in documents():
        name = str(path.relative_to(ROOT))
        try:
            text, stale = fill(path.read_text(encoding="utf-8"), name)
        except DocumentError as error:
            print(f"generate_docs: {error}", file=sys.stderr)
            failed = True
            continue
        for table_name in stale:
            print(f"{name}: {table_name} {'is stale' if check else 'rewritten'}")
        if stale and check:
            failed = True
        elif stale:
            path.write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
