"""Every parameter of every tier gets the gradient that the float64 reference gives it.

A step that loses gradients is fast, and its loss on random tokens looks right: the published
example trains 1 of 74 parameters. So this is asked of each tier in each precision, of the
step as it is run: compiled and captured where the tier is.
"""

import pytest
import torch

from correctness_tests.support.faults import detached_norm_tier
from correctness_tests.support.steps import SHAPE, oracle, run
from tinyllama.harness.check.compare import SLACK, Reference, compare
from tinyllama.harness.machine.device import cannot
from tinyllama.model.tiers import TIERS, StepPlan

PRECISIONS = ["fp32", "tf32", "bf16", "fp16"]
COUNT = 2 + 9 * SHAPE.num_layers


def assert_every_gradient(
    tier: str, precision: str, device: torch.device, seed: int, plan: StepPlan | None = None
) -> None:
    reason = cannot(precision, device)
    if reason:
        pytest.skip(f"{precision}: {reason}")
    expected = oracle(device, seed=seed).grads
    moved = [oracle(device, seed=seed, moved=draw).grads for draw in range(4)]
    baseline = run("v1", device, precision=precision, seed=seed).grads
    got = run(tier, device, precision=precision, seed=seed, plan=plan).grads
    assert len(expected) == COUNT
    lost = sorted(set(expected) - set(got))
    assert not lost, f"{len(lost)} of {COUNT} parameters get no gradient: {', '.join(lost)}"
    # Matrix units cut operands off to tf32, which biases a result; where, and so how much of it
    # the baseline has, differs from kernel to kernel (1.02 of the bound was seen on an H200).
    slack = SLACK * (1.5 if precision == "tf32" else 1.0)
    for name, exact in expected.items():
        reference = Reference(baseline[name], exact, [m[name] for m in moved])
        comparison = compare(f"grad {name}", got[name], reference, slack=slack)
        assert comparison.passed, str(comparison)
        assert comparison.sees_zero, f"{name}: zeros would pass"
        assert comparison.sees_scale or precision != "fp32", f"{name}: a factor 1.01 would pass"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tier", TIERS)
def test_every_parameter_gets_its_gradient(
    tier: str, precision: str, device: torch.device, seed: int
) -> None:
    assert_every_gradient(tier, precision, device, seed)


@pytest.mark.slow("compiles the step: about 20 s each on a CPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_parameter_gets_its_gradient_compiled(
    precision: str, device: torch.device, seed: int
) -> None:
    reason = cannot("compile", device)
    if reason:
        pytest.skip(reason)
    assert_every_gradient("v2", precision, device, seed, StepPlan(compile=True))


@pytest.mark.parametrize("plan", [None, StepPlan(memory="small")], ids=str)
def test_gradient_that_stops_at_final_norm_is_seen(
    plan: StepPlan | None, device: torch.device
) -> None:
    """The published fault: only the tied embedding learns, through the output projection."""
    message = f"{COUNT - 1} of {COUNT} parameters have no gradient"
    with detached_norm_tier() as tier, pytest.raises(RuntimeError, match=message):
        run(tier, device, plan=plan)
