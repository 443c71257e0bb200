"""What is not known behind a fault is blocked, as docs/check.md says."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import Loaded, variants
from tinyllama.harness.check.run import Finding, Outcome, run

VARIANTS = {str(variant): variant for variant in variants()}
BLOCKED = Outcome.BLOCKED


def checked(name: str, folder: Path, *checks: str) -> dict[str, Finding]:
    """What the checks say of a variant of the corpus, together, by check."""
    with Loaded(VARIANTS[name], folder) as candidate:
        return {finding.check: finding for finding in run(candidate, checks)}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("entry_product-upstream_gradient_scaled_in_place", "fresh contents"),
        ("entry_product-gradients_zero", "special values"),
        ("entry_product-plain_case_refused", "input layouts"),
    ],
)
def test_what_cannot_be_known_behind_a_fault_is_blocked(
    name: str, check: str, tmp_path: Path
) -> None:
    findings = checked(name, tmp_path, "outputs", "gradients", "untouched inputs", check)
    assert findings[check].outcome is BLOCKED


@pytest.mark.parametrize("cases", ["", "_in_larger_cases"])
def test_a_limit_of_the_interpreter_is_no_fault_of_a_kernel(cases: str, tmp_path: Path) -> None:
    name = f"doubled_vector-atomic_on_bfloat16{cases}"
    outputs = checked(name, tmp_path, "outputs")["outputs"]
    assert outputs.outcome is BLOCKED
    assert outputs.message.startswith("Triton's interpreter refuses what compiles for ")
    assert "no atomics on bfloat16" in outputs.message
