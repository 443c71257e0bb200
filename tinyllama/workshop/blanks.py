"""The files that a participant fills in: starters, whose blanks are ``____``, and solutions."""

import re
import tokenize
from pathlib import Path

from tinyllama.harness.machine.errors import UsageError

HERE = Path(__file__).resolve().parent
BLANK = "____"
TASK = f"\n\nReplace each {BLANK} , then run `tinyllama check` on this file.\n"
# By file, the expressions of its solution that the starter leaves blank.
BLANKED = {
    "rms_norm": (
        "offsets < n_elements",
        "x * x",
        "tl.sum(squares, axis=0) / n_elements + eps",
        "x * rstd * weight",
        "n * weight * dy",
        "rstd * (weight * dy - n * mean)",
        "n * dy",
    ),
    "rope": ("first * cos - second * sin", "first * sin + second * cos"),
    "swiglu": (
        "offsets < n_elements",
        "gate * tl.sigmoid(gate) * up",
        "dh * up * s * (1 + gate * rest)",
        "dh * gate * s",
    ),
}
NAMES = (*BLANKED, "ultra")


def starter(name: str) -> str:
    """The text of a starter: the solution with blanks; of ``ultra``, whose faults are to be found,
    a file of its own."""
    if name not in BLANKED:
        return (HERE / "starters" / f"{name}.py").read_text(encoding="utf-8")
    docstring, imports, code = solution(name).partition('\n"""\n')
    for expression in BLANKED[name]:
        assert expression in code, f"{name} has no {expression!r}"
        code = code.replace(expression, BLANK)
    return docstring + TASK + imports[1:] + code


def solution(name: str) -> str:
    return (HERE / "solutions" / f"{name}.py").read_text(encoding="utf-8")


def refuse_blanks(file: str) -> None:
    """Raise UsageError for a file with blanks; a starter calls this first, so that an unfilled one
    gets this message and no other."""
    path = Path(file)
    with path.open("rb") as source:
        blanks = [t for t in tokenize.tokenize(source.readline) if t.string == BLANK]
    if blanks:
        line = blanks[0].start[0]
        code = re.sub(r"\s+", " ", blanks[0].line).strip()
        raise UsageError(
            f"{path.name} has {len(blanks)} blanks, the first in line {line}: `{code}`: "
            f"replace each {BLANK}"
        )
