"""Shapes, layouts, dtypes and values that nobody declared: each provider with kernels is as
accurate on them, and a failure is shown in its smallest form.

The examples of a seed are the same everywhere; `make soak` draws others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis", reason="extra 'test' is not installed: it brings hypothesis")

import hypothesis
from hypothesis import strategies as st

from correctness_tests.ops.test_ops import assert_accurate
from correctness_tests.support.commands import python
from correctness_tests.support.launched import providers
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.evaluate import LAYOUTS, UPSTREAMS
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.machine.device import cannot
from tinyllama.ops import OPS

EXAMPLES, MANY = 5, 100

pytestmark = pytest.mark.skipif(
    cannot("triton", torch.device("cpu")) is not None, reason="triton is not installed"
)


def up_to(most: int, least: int = 1) -> st.SearchStrategy[int]:
    return st.integers(least, most)


def _heads(sizes: dict[str, int]) -> dict[str, int]:
    """Whole groups of query heads, and the dimensions that follow from a head's."""
    groups, pairs = sizes["G"], sizes["C"]
    return {"H": groups * sizes["per_group"], "G": groups, "K": 2 * pairs, "C": pairs}


def _attention(sizes: dict[str, int]) -> dict[str, int]:
    heads = _heads(sizes)
    return {"B": sizes["B"], "T": sizes["T"], **{name: heads[name] for name in "HGK"}}


def _rope(sizes: dict[str, int]) -> dict[str, int]:
    return {"B": sizes["B"], "T": sizes["T"], **_heads(sizes)}


def _block(sizes: dict[str, int]) -> dict[str, int]:
    heads = _heads(sizes)
    widths = {"Q": heads["H"] * heads["K"], "R": heads["G"] * heads["K"], "C": heads["C"]}
    # The query's gradient of one token alone is zero by cancellation; see the op's cases.
    return {"B": sizes["B"], "T": sizes["T"] + 1, "D": sizes["D"], "F": sizes["F"], **widths}


def _parameters(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    return {"P": tuple(size for name, size in sizes.items() if name.startswith("P"))}


GROUPED = {"B": up_to(2), "T": up_to(40), "G": up_to(2), "per_group": up_to(3), "C": up_to(20)}
SHAPES: dict[str, tuple[dict[str, st.SearchStrategy[int]], Callable[..., dict]]] = {
    "attention": (GROUPED, _attention),
    "rope": (GROUPED, _rope),
    "block": (
        {**GROUPED, "T": up_to(12), "C": up_to(8), "D": up_to(40, 8), "F": up_to(40)},
        _block,
    ),
    # A program for each element: interpreted, few of them.
    "swiglu-naive": ({"B": up_to(2), "T": up_to(2), "D": up_to(70), "F": up_to(9)}, dict),
    "adamw": ({"P1": up_to(2000), "P2": up_to(70), "P3": up_to(3)}, _parameters),
}


@st.composite
def op_case(draw: st.DrawFn, op: Op, provider: Provider) -> OpCase:
    """Any case of an op that its provider supports."""
    free = {name: up_to(70 if name in "DFV" else 9) for name in op.cases[0].dims}
    sizes, dims = SHAPES.get(str(provider), SHAPES.get(op.name, (free, dict)))
    case = Case(**dims({name: draw(size) for name, size in sizes.items()}))
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


@pytest.mark.slow("a hundred examples of each provider")
@pytest.mark.parametrize(("op", "provider"), KERNELS)
def test_is_accurate_wherever_in_many_places(
    op: Op, provider: Provider, device: torch.device, seed: int
) -> None:
    hold(op, provider, device, seed, MANY)


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


def test_without_hypothesis_they_are_skipped(tmp_path: Path) -> None:
    """The suite runs with less than the extra 'test' (README)."""
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError('hypothesis')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pytest; "
        f"sys.exit(pytest.main(['-rs', '-p', 'no:hypothesispytest', {__file__!r}]))"
    )
    found = python("-c", code)
    assert found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, found.stdout + found.stderr
    assert "extra 'test' is not installed: it brings hypothesis" in found.stdout


def test_every_provider_with_kernels_is_drawn() -> None:
    assert {op.name for op, _ in providers()} <= set(OPS)
    assert len(KERNELS) == len(list(providers())) > 0
