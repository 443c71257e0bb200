"""Shapes, layouts, dtypes and values that nobody declared: each provider with kernels is as
accurate on them, and a failure is shown in its smallest form.

The examples of a seed are the same everywhere; `make soak` draws others.
"""

import runpy
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="extra 'test' is not installed: it brings hypothesis")

import hypothesis
from hypothesis import strategies as st

from correctness_tests.support.launched import providers
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.layouts import LAYOUTS, UPSTREAMS
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.ops import OPS
from tinyllama.suites.accuracy import assert_accurate

EXAMPLES = 5  # of each provider
MANY, PARTS = 200, 8  # in the slow lane they are drawn in parts, so that several workers share them

pytest.importorskip("triton")


@st.composite
def op_case(draw: st.DrawFn, op: Op, provider: Provider) -> OpCase:
    """Any case of an op that its provider supports."""
    dims_of = provider.random_dims or op.dims_of
    dims: dict[str, Any]
    if dims_of is None:
        dims = {n: draw(st.integers(1, 70 if n in "DFV" else 9)) for n in op.cases[0].dims}
    else:
        dims = dict(dims_of(lambda low, high: draw(st.integers(low, high))))
    case = Case(**dims)
    hypothesis.assume(provider.supports(case.dims) is None)
    return OpCase(
        op,
        provider,
        case,
        draw(st.sampled_from([d for d in op.dtypes if d in provider.dtypes])),
        draw(st.sampled_from([None, *op.extremes])),
        draw(st.sampled_from(list(LAYOUTS))),
        draw(st.sampled_from(list(UPSTREAMS))) if op.differentiable else "contiguous",
    )


def hold(op: Op, provider: Provider, device: torch.device, seed: int, examples: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None)
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


@jit
def _double_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


def test_a_failure_is_shown_in_its_smallest_form(device: torch.device) -> None:
    """A kernel that ends at 32 elements, which no declared case reaches."""
    double = Op("double", inputs={"x": Tensor("D")}, outputs={"y": "D"}, cases=[Case(D=7)])
    double.reference(lambda x: 2 * x)

    @double.provider("short")
    def short(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape)
        _double_kernel[(1,)](contiguous(x), y, x.numel(), BLOCK=32)
        return y

    assert str(double["short"]) not in {str(provider) for _, provider in providers()}
    with pytest.raises(AssertionError) as failure:
        hold(double, double["short"], device, seed=0, examples=50)
    assert str(failure.value).startswith("double-short-D33-fp32\n")
    assert "case=double-short-D33-fp32" in "\n".join(getattr(failure.value, "__notes__", []))


def test_without_hypothesis_they_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs with less than the extra 'test' (README)."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    said = "extra 'test' is not installed: it brings hypothesis"
    with pytest.raises(pytest.skip.Exception, match=said):
        runpy.run_path(__file__)


def test_every_provider_with_kernels_is_drawn() -> None:
    assert {op.name for op, _ in providers()} <= set(OPS)
    assert len(KERNELS) == len(list(providers())) > 0
