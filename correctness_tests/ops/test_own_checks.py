"""The checks that `tinyllama check` makes of a user's kernel, made of this tree's own."""

from __future__ import annotations

import pytest

from correctness_tests.support.launched import providers
from tinyllama.harness.correct.checks import CHECKS, Candidate, Outcome, accuracy, run

pytest.importorskip("triton")

# Accuracy is a test for each case, in test_ops.py; what a chip compiles is in kernels/.
ELSEWHERE = (*accuracy.NAMES, "resources")
OWN = [Candidate(op, provider) for op, provider in providers()]


@pytest.mark.parametrize("candidate", OWN, ids=lambda one: str(one.provider))
@pytest.mark.parametrize("check", sorted({*CHECKS} - {*ELSEWHERE}))
def test_a_provider_passes_each_check(candidate: Candidate, check: str) -> None:
    (finding,) = run(candidate, [check])
    if finding.outcome is Outcome.UNSUPPORTED:
        pytest.skip(finding.message)
    assert finding.outcome is Outcome.PASSED, finding
