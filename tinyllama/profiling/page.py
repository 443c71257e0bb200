"""The summary page of ``profile all``: what each tool printed, in Markdown."""

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.machine.files import replace_text

PAGE = "summary.md"


@dataclass(frozen=True)
class Part:
    """One tool: how it ended, in a line, and what it printed."""

    outcome: str
    text: str


class _Both(io.StringIO):
    """Keeps what is written, and writes it on."""

    def __init__(self, on: io.TextIOBase) -> None:
        super().__init__()
        self.on = on

    def write(self, text: str) -> int:
        self.on.write(text)
        self.on.flush()
        return super().write(text)


@contextlib.contextmanager
def copied_output() -> Iterator[io.StringIO]:
    """What is printed meanwhile; it is shown as well."""
    both = _Both(sys.stdout)  # type: ignore[arg-type]
    with contextlib.redirect_stdout(both):
        yield both


def write(folder: Path, about: str, parts: Mapping[str, Part]) -> Path:
    """Write the page into the folder that holds the tools' folders; its path."""
    lines = [f"# Profile of {about}", "", "| tool | outcome |", "|---|---|"]
    lines += [f"| {tool} | {part.outcome.replace('|', '/')} |" for tool, part in parts.items()]
    for tool, part in parts.items():
        lines += ["", f"## {tool}", ""]
        lines += [f"    {line}".rstrip() for line in part.text.splitlines()]
    replace_text(folder / PAGE, "\n".join(lines) + "\n")
    return folder / PAGE
