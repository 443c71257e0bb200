"""What the author of a provider may state, and what it needs."""

from typing import Any

import pytest
import torch

from tinyllama.harness import DeclarationError
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
