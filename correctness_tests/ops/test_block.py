"""What cancels in the gradients of a block's query and key weights, how much memory a block takes,
and what it does not support."""

from collections.abc import Mapping

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness import Case
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import Inputs, evaluate
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


@pytest.mark.parametrize("draw", range(3))
def test_it_is_of_the_size_of_gradients_that_do_not_cancel(draw: int) -> None:
    """A sum of terms with random signs is about the root of the sum of their squares; here those of
    dP and of sum(P dP) count both."""
    inputs = drawn(tokens=33, seed=draw)
    gradients = evaluate(OPS["block"], OPS["block"]["eager"].call, inputs)
    for name, terms in magnitude(inputs).items():
        assert name in NAMES
        assert 1.0 < (terms.norm() / gradients[name].norm()).item() < 4.0


# -- memory, and what is not supported ----------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest product that is computed in a ``with`` block."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(("provider", "unsliced"), [("triton", True), ("small", False)])
def test_small_computes_the_swiglu_by_slices_of_rows(provider: str, unsliced: bool) -> None:
    pytest.importorskip("triton")
    op, N, F = OPS["block"], 128, 128
    case = Case(B=2, T=N // 2, D=8, Q=8, R=8, F=F, C=4)
    inputs = OpCase(op, op[provider], case, torch.float32).inputs()
    with Largest() as largest:
        evaluate(op, op[provider].call, inputs)
    assert largest.elements == (N if unsliced else N // sliced.SLICES) * 2 * F


@pytest.mark.parametrize("provider", ["triton", "selective", "small"])
def test_what_an_op_of_a_block_does_not_support_the_block_does_not(provider: str) -> None:
    pytest.importorskip("triton")
    fits = {"B": 1, "T": 2, "D": 8, "Q": 8, "R": 8, "F": 8, "C": 4}
    supports = OPS["block"][provider].supports
    assert supports(fits) is None
    assert "D = 16385 is more than 16384" in str(supports({**fits, "D": 16385}))
    assert "K is at most 256" in str(supports({**fits, "Q": 258, "R": 258, "C": 129}))
