"""On a GPU a second process interprets the kernels, and the worse finding of the two is told."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import variants
from tinyllama.harness.check import remote
from tinyllama.harness.check.names import LAUNCHED
from tinyllama.harness.check.requested import Request
from tinyllama.harness.check.run import Finding, Outcome, Rank
from tinyllama.harness.check.verdict import merged

VARIANTS = {str(variant): variant for variant in variants()}
PASSED, FAILED, CRASHED = Outcome.PASSED, Outcome.FAILED, Outcome.CRASHED
BLOCKED, UNSUPPORTED = Outcome.BLOCKED, Outcome.UNSUPPORTED


@pytest.mark.long
def test_the_second_process_finds_what_only_interpretation_shows(tmp_path: Path) -> None:
    """In a real process, whose environment is set before anything is imported. A CPU by another
    name stands for the GPU."""
    path = VARIANTS["scaled_copy-read_beyond_the_end"].write(tmp_path)
    request = Request("tinyllama.ops", str(path), None, "triton", "cpu:0", 0)
    answers = remote.check(request, ["outputs", "out of bounds", LAUNCHED])
    findings = {finding.check: finding for _, finding in answers if finding is not None}
    assert findings["out of bounds"].rank is Rank.UNSAFE
    assert "scaled_copy_kernel, program (0, 0, 0): a load" in findings["out of bounds"].message


@pytest.mark.parametrize(
    ("check", "on_gpu", "interpreted", "launched", "expected"),
    [
        ("out of bounds", PASSED, FAILED, True, FAILED),
        ("sizes", FAILED, PASSED, True, FAILED),
        ("races", UNSUPPORTED, PASSED, True, PASSED),
        ("races", UNSUPPORTED, CRASHED, True, BLOCKED),
        ("races", UNSUPPORTED, PASSED, False, BLOCKED),
        ("out of bounds", PASSED, BLOCKED, True, BLOCKED),
        ("sizes", PASSED, CRASHED, True, PASSED),
    ],
)
def test_the_worse_of_two_findings_is_told(
    check: str, on_gpu: Outcome, interpreted: Outcome, launched: bool, expected: Outcome
) -> None:
    findings = Finding(check, on_gpu), Finding(check, interpreted, message="by the interpreter")
    assert merged(*findings, launched).outcome is expected
