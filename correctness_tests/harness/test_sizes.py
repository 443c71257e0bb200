"""What the check `sizes` says of how far each axis was tried, and why no further."""

import time
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import MATRIX, finding, small
from tinyllama.harness import Case
from tinyllama.harness.check.run import Outcome, Rank


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def up_to_2000_rows(x: torch.Tensor) -> torch.Tensor:
    if len(x) > 2000:
        raise ValueError("no more than 2000 rows")
    return 2 * x


DOUBLED = small("doubled", doubled, {"x": MATRIX}, {"y": "N D"}, [Case(N=20, D=16)])


def few_columns(dims: Any) -> str | None:
    return None if dims["D"] <= 64 else "too wide"


def few_rows_and_columns(dims: Any) -> str | None:
    return None if dims["N"] <= 1100 and dims["D"] <= 300 else "too large"


def no_other(dims: Any) -> str | None:
    return None if dims == {"N": 20, "D": 16} else "another size"


def test_a_length_that_a_provider_does_not_support_is_said() -> None:
    result = finding(DOUBLED, doubled, "sizes", supports=few_rows_and_columns)
    assert result.outcome is Outcome.PASSED, result
    assert result.message.startswith(
        "N up to 1,025 (1,536 is not supported); D up to 259 (384 is not supported)"
    )
    result = finding(DOUBLED, doubled, "sizes", supports=no_other)
    assert result.outcome is Outcome.UNSUPPORTED
    assert result.message == "N not tried (1 is not supported); D not tried (1 is not supported)"


def test_a_length_that_the_reference_refuses_is_said() -> None:
    op = small("doubled", up_to_2000_rows, {"x": MATRIX}, {"y": "N D"})
    result = finding(op, doubled, "sizes", supports=few_columns)
    assert result.outcome is Outcome.PASSED, result
    assert "(the reference does not take 2,051: no more than 2000 rows)" in result.message


def test_a_length_that_would_take_more_than_ten_seconds_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])

    def slow(x: torch.Tensor) -> torch.Tensor:
        clock[0] += 1e-2 * len(x)
        return 2 * x

    result = finding(DOUBLED, slow, "sizes", supports=few_columns)
    assert result.outcome is Outcome.PASSED, result
    assert "N up to 770 (1,024 would take more than 10 s)" in result.message


def test_a_length_that_is_refused_is_named_and_is_no_wrong_result() -> None:
    result = finding(DOUBLED, up_to_2000_rows, "sizes", supports=few_columns)
    assert (result.outcome, result.rank) == (Outcome.CRASHED, Rank.REFUSED)
    assert "N2001D16" in result.case, "one more than a number that the code compares with"
