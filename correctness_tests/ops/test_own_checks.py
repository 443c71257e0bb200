"""The checks that `tinyllama check` makes of a user's kernel, made of this tree's own."""

from __future__ import annotations

import pytest

from correctness_tests.support.launched import providers
from tinyllama.harness.correct.checks import CHECKS, Candidate, Outcome, accuracy, run

pytest.importorskip("triton")

OWN = [Candidate(op, provider) for op, provider in providers()]
# Of checks that can say nothing here: what they say.
UNSUPPORTED: dict[str, str] = {}


@pytest.mark.parametrize("candidate", OWN, ids=lambda one: str(one.provider))
@pytest.mark.parametrize("check", [name for name in CHECKS if name not in (*accuracy.NAMES, "resources")])
def test_a_provider_passes_each_check(candidate: Candidate, check: str) -> None:
    (finding,) = run(candidate, [check])
    if finding.outcome is Outcome.UNSUPPORTED:
        pytest.skip(finding.message)
    assert finding.outcome is Outcome.PASSED, finding
