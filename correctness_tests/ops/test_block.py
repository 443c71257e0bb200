"""What cancels in the gradients of a block's query and key weights, how much memory a block takes,
and what it does not support."""

from collections.abc import Mapping

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness import Case
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.evaluate import Inputs, evaluate
from tinyllama.ops import OPS
from tinyllama.ops.block import sliced

NAMES = ("grad w_q", "grad w_k")


def drawn(tokens: int, seed: int = 0) -> Inputs:
    op = OPS["block"]
    case = next(case for case in op.cases if case.dims["T"] == tokens)
    return OpCase(op, op["eager"], case, torch.float32).inputs(seed=seed).double()


def magnitude(
    inputs: Inputs, times: float = 1.0, **changed: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """Of these inputs with some changed, and with so many times the upstream gradient."""
    of, dy = OPS["block"].magnitudes, inputs.upstream["y"]
    assert of is not None
    assert dy is not None
    args = {**inputs.args, **changed}
    return of(**args, upstream={"y": times * dy[: len(args["x"])]}, **inputs.params)


def test_it_is_there_where_the_gradients_are_zero() -> None:
    inputs = drawn(tokens=1)
    gradients = evaluate(OPS["block"], OPS["block"]["eager"].call, inputs)
    for name in NAMES:
        assert gradients[name].norm() < 1e-12
        assert magnitude(inputs)[name].shape == gradients[name].shape
        assert magnitude(inputs)[name].norm() > 1e-3


@pytest.mark.parametrize("draw", range(3))
def test_it_is_of_the_size_of_gradients_that_do_not_cancel(draw: int) -> None:
    """A sum of terms with random signs is about the root of the sum of their squares; here those of
    dP and of sum(P dP) count both."""
    inputs = drawn(tokens=33, seed=draw)
    gradients = evaluate(OPS["block"], OPS["block"]["eager"].call, inputs)
    for name, terms in magnitude(inputs).items():
        assert name in NAMES
        assert 1.0 < (terms.norm() / gradients[name].norm()).item() < 4.0


def test_of_one_token_it_is_an_outer_product_with_what_was_normed() -> None:
    inputs = drawn(tokens=1)
    x, weight = inputs.args["x"][:1], inputs.args["attention_norm"]
    found = magnitude(inputs, x=x)
    n_D = OPS["rms_norm"]["eager"].call(x, weight, eps=inputs.params["eps"]).flatten()
    for name in NAMES:
        share = found[name] / n_D.abs()
        torch.testing.assert_close(share, share[:, :1].expand_as(share))


def test_it_is_linear_in_the_upstream_gradient_and_is_turned_back() -> None:
    inputs = drawn(tokens=9)
    twice = magnitude(inputs, 2.0)
    for name, terms in magnitude(inputs).items():
        torch.testing.assert_close(twice[name], 2 * terms)
    # All turned by a quarter, queries and keys have the same products as before, and so has the
    # gradient that is turned back.
    nothing, all_ = torch.zeros_like(inputs.args["cos"]), torch.ones_like(inputs.args["cos"])
    turned, plain = (
        magnitude(inputs, cos=nothing, sin=all_),
        magnitude(inputs, cos=all_, sin=nothing),
    )
    for name in NAMES:
        one, other = turned[name], plain[name]
        torch.testing.assert_close(one, other)
        assert not torch.allclose(one, one.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))


# -- memory, and what is not supported ----------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest product that is computed in a ``with`` block."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize(("provider", "whole"), [("triton", True), ("small", False)])
def test_small_computes_the_swiglu_by_slices_of_rows(provider: str, whole: bool) -> None:
    pytest.importorskip("triton")
    op, N, F = OPS["block"], 128, 128
    case = Case(B=2, T=N // 2, D=8, Q=8, R=8, F=F, C=4)
    inputs = OpCase(op, op[provider], case, torch.float32).inputs()
    with Largest() as largest:
        evaluate(op, op[provider].call, inputs)
    assert largest.elements == (N if whole else N // sliced.SLICES) * 2 * F


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 31, 33, 127, 128, 1000])
def test_slices_are_of_about_the_same_length_and_cover_the_rows(rows: int) -> None:
    found = list(sliced.slices(rows))
    lengths = [one.stop - one.start for one in found]
    assert [i for one in found for i in range(rows)[one]] == list(range(rows))
    assert len(found) <= sliced.SLICES
    assert max(lengths) - min(lengths) <= 1
    assert len(found) == 1 or min(lengths) >= sliced.FEWEST_ROWS


@pytest.mark.parametrize("provider", ["triton", "selective", "small"])
def test_what_an_op_of_a_block_does_not_support_the_block_does_not(provider: str) -> None:
    pytest.importorskip("triton")
    fits = {"B": 1, "T": 2, "D": 8, "Q": 8, "R": 8, "F": 8, "C": 4}
    supports = OPS["block"][provider].supports
    assert supports(fits) is None
    assert "D = 16385 is more than 16384" in str(supports({**fits, "D": 16385}))
    assert "K is at most 256" in str(supports({**fits, "Q": 258, "R": 258, "C": 129}))
