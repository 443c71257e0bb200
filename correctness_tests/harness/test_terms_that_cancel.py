"""A right result whose terms cancel: what an op that declares them is spared, and one that does not
is told."""

import runpy
from pathlib import Path

import pytest

from tinyllama.harness import Op
from tinyllama.harness.correct.checks import Candidate, Outcome, run

EXAMPLE = Path(__file__).parents[2] / "docs/examples/causal_attention.py"
SPARED = ("outputs", "gradients", "scaled upstream", "fresh contents", "special values")


@pytest.fixture
def flash() -> Candidate:
    op: Op = runpy.run_path(str(EXAMPLE))["causal_attention"]
    return Candidate(op, op["flash"])


def test_flash_attention_is_right_where_its_terms_are_declared(flash: Candidate) -> None:
    found = {one.check: one for one in run(flash, SPARED)}
    assert {name: one.outcome for name, one in found.items()} == dict.fromkeys(
        SPARED, Outcome.PASSED
    ), [one.message for one in found.values()]


def test_where_they_are_not_its_author_is_told_to(flash: Candidate) -> None:
    """The gradient of the first query, which sees one key, is zero in eager."""
    flash.op.magnitudes = None
    failed = [one for one in run(flash, ("outputs", "gradients")) if one.check == "gradients"]
    assert [one.outcome for one in failed] == [Outcome.FAILED]
    text = failed[0].message
    assert "grad q: tensor error" in text
    assert "if terms of a sum cancel in this row, declare their magnitude" in text
