"""Counts of bytes and operations, derived in docs/model.md, are those that ops declare."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tinyllama.ops import OPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "model.md"
ROW = re.compile(r"^\| `(\w+)` \| (forward|backward) \| `(.+?)` \| `(.+?)` \| `(.+?)` \|", re.M)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def sizes(seed: int) -> dict[str, Any]:
    """Numbers for every letter; those that are products of others are."""
    draw = random.Random(seed)
    of = {letter: draw.randint(2, 50) for letter in "BTDHGFVCP"}
    of["K"], of["N"] = 2 * of["C"], of["B"] * of["T"]
    return {**of, "Q": of["H"] * of["K"], "R": of["G"] * of["K"]}


@pytest.mark.parametrize(
    ("name", "passes", "reads", "writes", "operations"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS]
)
def test_a_derived_count_is_the_declared_one(
    name: str, passes: str, reads: str, writes: str, operations: str
) -> None:
    op = OPS[name]
    for of in map(sizes, range(3)):
        dims = {axis: [of["P"]] if axis == "P" else of[axis] for axis in op.cases[0].dims}
        elements, done = (eval(text, {}, of) for text in (f"{reads} + {writes}", operations))
        moved = [op.bytes[passes](size, **dims) for size in (1, 2)]
        assert moved[1] - moved[0] == elements, "tables and numbers have a size of their own"
        assert op.flops[passes](**dims) == done


def test_every_op_of_the_first_tier_that_has_a_row_has_its_passes() -> None:
    passes_of_ops = {(name, passes) for name, passes, *_ in ROWS}
    assert len(passes_of_ops) == len(ROWS) >= 18
    assert {name for name, _ in passes_of_ops} >= {"rms_norm", "attention", "swiglu", "adamw"}
