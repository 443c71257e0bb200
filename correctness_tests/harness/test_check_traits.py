"""What an author states is held to, and is no fault: contiguous inputs, gradients that are not
given or that are overwritten by design, dtypes of outputs; and a slack has an end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support import tried
from correctness_tests.support.narrowed import narrowed
from correctness_tests.support.saboteurs.base import with_upstream
from tinyllama.harness import Case, DeclarationError, Op
from tinyllama.harness.correct.checks import Finding, Outcome, Rank
from tinyllama.harness.declare.op import MOST_SLACK
from tinyllama.harness.declare.specs import Terms
from tinyllama.harness.declare.values import Values
from tinyllama.ops import OPS

SILU = OPS["silu_mul"]
EAGER = SILU["eager"].call
PASSED, FAILED, UNSUPPORTED = Outcome.PASSED, Outcome.FAILED, Outcome.UNSUPPORTED


def found(op: Op, call: Callable[..., Any], *only: str, **traits: Any) -> dict[str, Finding]:
    dims = op.cases[0].dims
    supports = lambda given: None if given == dims else "another"  # noqa: E731
    return tried.found(op, call, *only, supports=supports, **traits)


def refusing(gate: torch.Tensor, up: torch.Tensor) -> Any:
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError("contiguous inputs only")
    return EAGER(gate, up)


def wrong_elsewhere(gate: torch.Tensor, up: torch.Tensor) -> Any:
    return EAGER(gate, up) * (1.0 if up.is_contiguous() else 1.5)


@pytest.mark.parametrize(
    ("call", "declared", "rank"),
    [
        (refusing, True, None),
        (refusing, False, Rank.CONTRACT),
        (wrong_elsewhere, True, Rank.WRONG),
        (EAGER, True, None),
    ],
    ids=["declared", "not declared", "silently wrong", "takes all"],
)
def test_contiguous_inputs_alone_are_a_limit_that_may_be_declared(
    call: Any, declared: bool, rank: Rank | None
) -> None:
    finding = found(SILU, call, "input layouts", contiguous=declared)["input layouts"]
    assert finding.rank is rank, finding


def test_under_autocast_too_what_cancels_is_held_to_the_terms_that_are_declared() -> None:
    one_key = Case(B=1, T=1, H=2, G=1, K=16)  # so the gradient of q is zero
    attention = narrowed(OPS["attention"], [one_key])
    eager = attention["eager"].call

    def rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """The gradient of q is rounded as a difference of terms near 1 is."""
        return eager(with_upstream(q, lambda dq: dq + 2.0**-21), k, v)

    assert found(attention, rounded, "autocast")["autocast"].outcome is PASSED
    attention.magnitudes = None
    assert found(attention, rounded, "autocast")["autocast"].outcome is FAILED


def test_under_autocast_too_terms_are_held_in_the_dtype_that_is_declared() -> None:
    """The probability of the target is 1 up to 2e-13, and its gradient that much below 0."""
    logits = Values("sure", lambda shape, generator: 30.0 * torch.eye(*shape))
    target = Values("0", lambda shape, generator: torch.zeros(shape, dtype=torch.int64))
    case = Case(N=1, V=3, values={"logits": logits, "targets": target})
    loss = narrowed(OPS["cross_entropy"], [case])
    eager = loss["eager"].call

    def off(by: float) -> Any:
        def call(logits: torch.Tensor, targets: torch.Tensor, **params: Any) -> Any:
            return eager(with_upstream(logits, lambda g: g + by), targets, **params)

        return found(loss, call, "autocast")["autocast"].outcome

    assert off(2.0**-26) is PASSED
    assert off(2.0**-12) is FAILED
    loss.terms = Terms()
    assert off(2.0**-12) is PASSED


def test_an_upstream_gradient_may_be_overwritten_by_design() -> None:
    def call(gate: torch.Tensor, up: torch.Tensor) -> Any:
        return with_upstream(EAGER(gate, up), lambda g: g.mul_(0.5) * 2)

    only = ("gradients", "untouched inputs", "two consumers", "determinism")
    undeclared = found(SILU, call, *only)
    assert undeclared["untouched inputs"].outcome is FAILED
    assert undeclared["two consumers"].outcome is FAILED
    (output,) = SILU.outputs
    declared = found(SILU, call, *only, overwrites=(output,))
    assert {one.outcome for one in declared.values()} == {PASSED, UNSUPPORTED}
    assert f"upstream gradient of {output}" in declared["two consumers"].message


def half_frozen(gate: torch.Tensor, up: torch.Tensor) -> Any:
    return EAGER(gate, up.detach())


def test_an_input_may_be_frozen_for_one_provider() -> None:
    only = ("outputs", "gradients", "scaled upstream")
    assert found(SILU, half_frozen, "gradients")["gradients"].outcome is FAILED
    declared = found(SILU, half_frozen, *only, frozen=("up",))
    assert {one.outcome for one in declared.values()} == {PASSED}
    wrong = found(SILU, lambda gate, up: half_frozen(gate, up) * 1.5, *only, frozen=("up",))
    assert wrong["gradients"].outcome is FAILED


def test_an_output_may_have_a_dtype_of_its_own() -> None:
    def wide(gate: torch.Tensor, up: torch.Tensor) -> Any:
        return EAGER(gate.float(), up.float())

    half: dict[str, Any] = {"dtypes": (torch.bfloat16,)}
    assert found(SILU, wide, "outputs", **half)["outputs"].outcome is FAILED
    (output,) = SILU.outputs
    own = {**half, "output_dtypes": {output: torch.float32}}
    findings = found(SILU, wide, "outputs", "gradients", **own)
    assert {one.outcome for one in findings.values()} == {PASSED}, findings
    assert found(SILU, EAGER, "outputs", **own)["outputs"].outcome is FAILED


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"frozen": ("x",)}, "frozen of 'other' names 'x': use gate, up"),
        ({"overwrites": ("dy",)}, "overwrites of 'other' names 'dy': use gate, up, "),
        ({"output_dtypes": {"y": torch.float32}}, "output_dtypes of 'other' names 'y'"),
        ({"slack": {torch.float32: 1e9}}, f"use 0 to {MOST_SLACK:.0f}"),
    ],
)
def test_a_trait_of_nothing_and_a_slack_without_end_are_refused(
    traits: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeclarationError) as caught:
        SILU.provider("other", **traits)(EAGER)
    assert message in str(caught.value)


def test_all_that_a_provider_requires_is_asked_for() -> None:
    finding = tried.finding(SILU, EAGER, "outputs", requires=("triton", "gpu"))
    assert finding.outcome is Outcome.UNSUPPORTED, finding
