"""Shapes, layouts, dtypes and values that nobody declared, with the parameters of any case: each
provider with kernels is as accurate on them, and a failure is shown in its smallest form.

The examples of a seed are the same everywhere; `--case-seed` names others.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="extra 'test' is not installed: it brings hypothesis")

import hypothesis
from hypothesis import strategies as st

from correctness_tests.support.launched import providers
from tinyllama.harness import Case, Op, Provider
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.layouts import LAYOUTS, UPSTREAMS
from tinyllama.suites.accuracy import assert_accurate

EXAMPLES = 3  # of each provider
MANY, PARTS = 200, 8  # in the slow lane they are drawn in parts, so that several workers share them

pytest.importorskip("triton")


def settings(op: Op) -> list[tuple[Case, dict[str, Any]]]:
    """Cases of an op that differ in parameters or values, each with the dimensions that its values
    may depend on: those of other inputs."""
    cases: list[tuple[Case, dict[str, Any]]] = [(Case(**op.cases[0].dims), {})]
    for case in op.cases:
        if any(
            (case.params, case.values) == (case_before.params, case_before.values)
            for case_before, _ in cases
        ):
            continue
        free = " ".join(op.inputs[name].shape for name in case.values)
        cases.append((case, {n: v for n, v in case.dims.items() if case.values and n not in free}))
    return cases


@st.composite
def op_case(draw: st.DrawFn, op: Op, provider: Provider) -> OpCase:
    """Any case of an op that its provider supports."""
    dims_of = provider.random_dims or op.dims_of
    dims: dict[str, Any]
    if dims_of is None:
        dims = {n: draw(st.integers(1, 70 if n in "DFV" else 9)) for n in op.cases[0].dims}
    else:
        dims = dict(dims_of(lambda low, high: draw(st.integers(low, high))))
    for name in op.leading:
        dims[name] = draw(st.just(dims[name]) | st.lists(st.integers(1, 3), max_size=3).map(tuple))
    like, fixed = draw(st.sampled_from(settings(op)))
    case = like.resized(**dims | fixed)
    extremes = [
        name for name, changed in op.extremes.items() if not changed.keys() & like.values.keys()
    ]
    hypothesis.assume(provider.supports(op.numbers(case.dims)) is None)
    return OpCase(
        op,
        provider,
        case,
        draw(st.sampled_from([d for d in op.dtypes if d in provider.dtypes])),
        draw(st.sampled_from([None, *extremes])),
        draw(st.sampled_from(list(LAYOUTS))),
        draw(st.sampled_from(list(UPSTREAMS))) if op.differentiable else "contiguous",
    )


def hold(op: Op, provider: Provider, device: torch.device, seed: int, examples: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # of a busy machine
    )
    @hypothesis.given(op_case(op, provider))
    def holds(case: OpCase) -> None:
        assert_accurate(case, device, seed)

    holds()


KERNELS = [pytest.param(*pair, id=str(pair[1])) for pair in providers()]


@pytest.mark.parametrize(("op", "provider"), KERNELS)
def test_is_accurate_wherever(op: Op, provider: Provider, device: torch.device, seed: int) -> None:
    hold(op, provider, device, seed, EXAMPLES)


@pytest.mark.slow("two hundred examples of each provider")
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part}")
@pytest.mark.parametrize(("op", "provider"), KERNELS)
def test_is_accurate_wherever_in_many_places(
    op: Op, provider: Provider, device: torch.device, seed: int, part: int
) -> None:
    """Each part begins with the smallest example, which is the same in all."""
    hold(op, provider, device, seed * PARTS + part, MANY // PARTS + 1)
