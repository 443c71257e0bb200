"""Behind a fault the other checks go on around it, as docs/CHECK.md says."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import Loaded, variants
from tinyllama.harness.check.run import Finding, Outcome, run

VARIANTS = {str(variant): variant for variant in variants()}
PASSED, FAILED, BLOCKED = Outcome.PASSED, Outcome.FAILED, Outcome.BLOCKED


def checked(name: str, folder: Path, *checks: str) -> dict[str, Finding]:
    """What the checks say of a variant of the corpus, together, by check."""
    with Loaded(VARIANTS[name], folder) as candidate:
        return {finding.check: finding for finding in run(candidate, checks)}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("entry_product-rows_left_out_beside_an_overwritten_upstream_gradient", "sizes"),
        ("entry_product-rows_left_out_beside_a_backward_that_raises", "sizes"),
        ("entry_product-race_beside_a_backward_that_raises", "races"),
    ],
)
def test_a_fault_is_found_behind_another_one(name: str, check: str, tmp_path: Path) -> None:
    findings = checked(name, tmp_path, "gradients", "untouched inputs", check)
    assert findings[check].outcome is FAILED
    assert VARIANTS[name].result in findings[check].message


@pytest.mark.parametrize(
    ("name", "check", "outcome"),
    [
        ("entry_product-upstream_gradient_scaled_in_place", "special values", PASSED),
        ("entry_product-upstream_gradient_scaled_in_place", "fresh contents", BLOCKED),
        ("entry_product-gradients_zero", "special values", BLOCKED),
        ("entry_product-plain_case_refused", "input layouts", BLOCKED),
    ],
)
def test_what_cannot_be_known_behind_a_fault_is_blocked(
    name: str, check: str, outcome: Outcome, tmp_path: Path
) -> None:
    findings = checked(name, tmp_path, "outputs", "gradients", "untouched inputs", check)
    assert findings[check].outcome is outcome


def test_a_fault_that_follows_from_another_one_names_it(tmp_path: Path) -> None:
    name = "entry_product-upstream_gradient_scaled_in_place"
    findings = checked(name, tmp_path, "untouched inputs", "backward twice")
    assert findings["backward twice"].outcome is FAILED
    assert findings["backward twice"].cause == "untouched inputs"


@pytest.mark.parametrize("cases", ["", "_in_larger_cases"])
def test_a_limit_of_the_interpreter_is_no_fault_of_a_kernel(cases: str, tmp_path: Path) -> None:
    name = f"doubled_vector-atomic_on_bfloat16{cases}"
    outputs = checked(name, tmp_path, "outputs")["outputs"]
    assert outputs.outcome is BLOCKED
    assert outputs.message.startswith("Triton's interpreter refuses what compiles for ")
    assert "no atomics on bfloat16" in outputs.message
