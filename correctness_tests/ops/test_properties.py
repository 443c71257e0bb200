"""Shapes, layouts, dtypes and values that nobody declared, with the parameters of any case: each
provider with kernels is as accurate on them, and a failure is shown in its smallest form.

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


def settings(op: Op) -> list[tuple[Case, dict[str, Any]]]:
    """Cases of an op that differ in parameters or values, each with the dimensions that its values
    may depend on: those of other inputs."""
    found: list[tuple[Case, dict[str, Any]]] = [(Case(**op.cases[0].dims), {})]
    for case in op.cases:
        if any((case.params, case.values) == (one.params, one.values) for one, _ in found):
            continue
        free = " ".join(op.inputs[name].shape for name in case.values)
        found.append((case, {n: v for n, v in case.dims.items() if case.values and n not in free}))
    return found


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
        name for name, given in op.extremes.items() if not given.keys() & like.values.keys()
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


def test_other_parameters_and_more_axes_are_drawn(device: torch.device) -> None:
    """A provider that is right for the usual parameter alone, and one for matrices alone."""
    shift = Op(
        "shift",
        inputs={"x": Tensor("N D")},
        outputs={"y": "N D"},
        params={"by": 0.0},
        leading=("N",),
        cases=[Case(N=2, D=7), Case(N=2, D=7, params={"by": 2.0})],
    )
    shift.reference(lambda x, by: x + by)
    shift.provider("unshifted")(lambda x, by: x.clone())
    shift.provider("matrices")(lambda x, by: x + (by if x.dim() == 2 else 1))
    shift.provider("right")(lambda x, by: x + by)
    for name, found in (("unshifted", "N1D1,by=2.0"), ("matrices", "ND1")):
        with pytest.raises(AssertionError, match=f"shift-{name}-{found}-fp32\n"):
            hold(shift, shift[name], device, seed=0, examples=50)
    hold(shift, shift["right"], device, seed=0, examples=50)


def test_the_settings_of_an_op_are_those_of_its_cases() -> None:
    """Sizes that values of another input may depend on stay: classes, if targets are ignored."""
    for op in OPS.values():
        assert all(any(case.params == one.params for one, _ in settings(op)) for case in op.cases)
    ignored = [fixed for case, fixed in settings(OPS["cross_entropy"]) if case.values]
    assert ignored == [{"V": 50}] * 4


def test_without_hypothesis_they_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs with less than the extra 'test' (README)."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    said = "extra 'test' is not installed: it brings hypothesis"
    with pytest.raises(pytest.skip.Exception, match=said):
        runpy.run_path(__file__)


def test_every_provider_with_kernels_is_drawn() -> None:
    assert {op.name for op, _ in providers()} <= set(OPS)
    assert len(KERNELS) == len(list(providers())) > 0
