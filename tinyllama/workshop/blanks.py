"""The files that a participant fills in: starters, whose blanks are ``____``, and solutions."""

import re
import tokenize
from pathlib import Path

from tinyllama.harness.machine.errors import UsageError

HERE = Path(__file__).resolve().parent
NAMES = ("rms_norm", "rope", "swiglu", "ultra")
BLANK = "____"


def starter(name: str) -> str:
    return (HERE / "starters" / f"{name}.py").read_text(encoding="utf-8")


def solution(name: str) -> str:
    return (HERE / "solutions" / f"{name}.py").read_text(encoding="utf-8")


def refuse_blanks(file: str) -> None:
    """Raise UsageError for a file with blanks; a starter calls this first, so that an unfilled one
    gets this message and no other."""
    path = Path(file)
    with path.open("rb") as source:
        names = [t for t in tokenize.tokenize(source.readline) if t.type == tokenize.NAME]
    lines = [token.start[0] for token in names if token.string == BLANK]
    if lines:
        code = path.read_text(encoding="utf-8").splitlines()[lines[0] - 1]
        first = re.sub(r"\s+", " ", code).strip()
        raise UsageError(
            f"{path.name} has {len(lines)} blanks, the first in line {lines[0]}: `{first}`: "
            f"replace each {BLANK}"
        )
