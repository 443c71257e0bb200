"""On a GPU a second process interprets the kernels, and the worse finding of the two is told."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import variants
from tinyllama.harness.check import remote
from tinyllama.harness.check.names import LAUNCHED
from tinyllama.harness.check.remote import Request
from tinyllama.harness.check.run import Rank

VARIANTS = {str(variant): variant for variant in variants()}


@pytest.mark.long
def test_the_second_process_finds_what_only_interpretation_shows(tmp_path: Path) -> None:
    """In a real process, whose environment is set before anything is imported. A CPU by another
    name stands for the GPU."""
    path = VARIANTS["scaled_copy-read_beyond_the_end"].write(tmp_path)
    request = Request(str(path), None, "triton", "cpu:0", 0)
    answers = remote.check(request, ["outputs", "out of bounds", LAUNCHED])
    findings = {finding.check: finding for _, finding in answers if finding is not None}
    assert findings["out of bounds"].rank is Rank.UNSAFE
    assert "scaled_copy_kernel, program (0, 0, 0): a load" in findings["out of bounds"].message
