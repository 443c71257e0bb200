"""The magnitude of what cancels in the gradients of a block's query and key weights."""

from collections.abc import Mapping

import pytest
import torch

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.evaluate import Inputs, evaluate
from tinyllama.ops import OPS

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
