"""On a GPU a second process interprets the kernels, and the worse finding of the two is told."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import Loaded, Variant, findings, variants
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


@pytest.mark.parametrize("name", ["doubled_vector", "doubled_vector-store_one_beyond"])
def test_a_file_that_asks_for_its_gpu_is_judged_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver answers as one of a GPU does; this machine need not have any."""
    import torch
    from triton.runtime import driver

    from tinyllama.harness.kernels.foreign import gpus_hidden

    class OfGpu:
        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    variant: Variant = VARIANTS[name]
    with gpus_hidden():  # puts back what is active now
        driver.set_active(OfGpu())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with Loaded(variant, tmp_path, "cpu") as candidate:
            answers = list(findings(candidate, ["outputs", "out of bounds"]))
        assert driver.active.get_active_torch_device().type == "cuda"
        assert torch.cuda.is_available()
        monkeypatch.undo()
    expected = FAILED if variant.fault else PASSED
    assert [finding.outcome for finding in answers] == [PASSED, expected]
