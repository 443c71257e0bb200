"""Each reference is right: in float64 it agrees with code that is not ours.

A reference compared only with itself hides its own error, and every provider would be held
to that error. Rows of small magnitude, where an epsilon shows, are among the cases.
"""

import pytest
import torch

from tinyllama.harness import Case, Op
from tinyllama.harness.check.evaluate import evaluate, make_inputs
from tinyllama.harness.check.reference import disagreements
from tinyllama.ops import OPS
from tinyllama.ops.adamw import adamw
from tinyllama.ops.attention import attention
from tinyllama.ops.rope import rope_tables

pytestmark = pytest.mark.quick


def references() -> list:
    return [
        pytest.param(op, source, case, extreme, id=f"{op.name}-{case}-{extreme or 'plain'}")
        for op in OPS.values()
        for source in op.independents
        for case in op.cases
        for extreme in (None, *op.extremes)
    ]


@pytest.mark.parametrize(("op", "source", "case", "extreme"), references())
def test_reference_agrees_with_code_that_is_not_ours(
    op: Op, source: str, case: Case, extreme: str | None, seed: int
) -> None:
    inputs = make_inputs(op, case, torch.float64, seed=seed, extreme=extreme)
    assert not disagreements(op, source, inputs)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_reference_is_checked(op: Op) -> None:
    assert op.independents, f"{op.name} has no independent implementation"


def test_attention_sees_no_future_token() -> None:
    """Changing the last token changes the last output alone."""
    inputs = make_inputs(attention, attention.cases[0], torch.float64).args
    changed = {name: value.clone() for name, value in inputs.items()}
    for value in changed.values():
        value[:, -1] += 1.0
    before, after = (attention(*args.values()) for args in (inputs, changed))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_rope_depends_on_relative_positions_alone() -> None:
    """q at i against k at j gives the same score as q at i + s against k at j + s."""
    cos, sin = (table.double() for table in rope_tables(40, 16))
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=generator)
    rope = OPS["rope"]

    def score(i: int, j: int) -> torch.Tensor:
        (q_i, _), (k_j, _) = (
            rope(x, x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, i), (k, j))
        )
        return (q_i * k_j).sum()

    torch.testing.assert_close(score(5, 2), score(25, 22), rtol=1e-5, atol=0)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rope_tables_are_those_of_the_formula() -> None:
    cos, sin = rope_tables(7, 8, theta=100.0)
    angle = 6 * 100.0 ** (-4 / 8)  # position 6, pair 2
    assert cos[6, 2] == pytest.approx(torch.tensor(angle).cos().item(), abs=1e-6)
    assert sin[6, 2] == pytest.approx(torch.tensor(angle).sin().item(), abs=1e-6)
    assert cos[0].eq(1).all()
    assert sin[0].eq(0).all()


def test_adamw_skips_a_step_that_is_not_finite() -> None:
    inputs = make_inputs(adamw, adamw.cases[0], torch.float64, extreme="skipped")
    results = evaluate(adamw, adamw["eager"].call, inputs)
    assert torch.equal(results["step"], inputs.args["step"])
    assert torch.equal(results["param[0]"], inputs.args["param"][0])
