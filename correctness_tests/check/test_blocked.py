"""What the reference raises, or the distribution of an input, is not the candidate's fault."""

import torch

from correctness_tests.support.tried import finding, small
from tinyllama.harness import Tensor
from tinyllama.harness.check.run import Outcome
from tinyllama.harness.declare.values import Values

X = {"x": Tensor("N D")}


def refuses(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("nothing to normalise")


def test_a_check_is_blocked_where_the_reference_raises() -> None:
    op = small("normalised", refuses, X, {"y": "N D"})
    blocked = finding(op, lambda x: x / x.norm(), "outputs")
    assert blocked.outcome is Outcome.BLOCKED
    assert blocked.rank is None
    assert "the reference raised an error: " in blocked.message
    assert blocked.case == "normalised-tried-N5D8-fp32"


def test_an_error_of_the_candidate_is_its_own() -> None:
    op = small("normalised", lambda x: x / x.norm(), X, {"y": "N D"})
    assert finding(op, refuses, "outputs").outcome is Outcome.CRASHED


def test_a_check_is_blocked_where_a_distribution_raises() -> None:
    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        raise RuntimeError("no order of this length")

    order = Tensor("N", dtype=torch.int64, values=Values("order", sample))
    op = small("ordered", lambda x, order: x[order], {**X, "order": order}, {"y": "N D"})
    blocked = finding(op, lambda x, order: x[order], "outputs")
    assert blocked.outcome is Outcome.BLOCKED
    assert "the declared distribution of order raised an error: " in blocked.message
