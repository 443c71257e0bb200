"""What the author of a provider may state, and what it needs."""

from typing import Any

import pytest
import torch

from correctness_tests.support import tried
from tinyllama.harness import DeclarationError
from tinyllama.harness.check.run import Outcome
from tinyllama.ops import OPS

SILU = OPS["silu_mul"]


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"frozen": ("x",)}, "frozen of 'other' names 'x': use gate, up"),
        ({"overwrites": ("dy",)}, "overwrites of 'other' names 'dy': use gate, up, "),
        ({"output_dtypes": {"y": torch.float32}}, "output_dtypes of 'other' names 'y'"),
        ({"slack": {torch.float32: 1e9}}, "use 0 to 100"),
    ],
)
def test_a_trait_of_nothing_and_a_slack_without_end_are_refused(
    traits: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeclarationError) as error:
        SILU.provider("other", **traits)(SILU["eager"].call)
    assert message in str(error.value)


def test_a_provider_that_needs_a_gpu_is_not_checked_without_one() -> None:
    pytest.importorskip("triton")
    finding = tried.finding(SILU, SILU["eager"].call, "outputs", requires=("triton", "gpu"))
    assert finding.outcome is Outcome.UNSUPPORTED, finding
    assert "GPU" in finding.message
