"""The gradient of a table with blocks that no case has."""

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness import Case
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops.embedding import GRADIENT, embedding

CASE = OpCase(embedding, embedding["triton"], Case(N=40, V=6, D=50), torch.float32)


@pytest.mark.parametrize(("columns", "tokens"), [(16, 32), (32, 16)])
def test_blocks_of_any_proportion(columns: int, tokens: int, device: torch.device) -> None:
    """Several of both; in the cases of the op both have 128, or there is one block of columns."""
    config = Config(COLUMNS=columns, TOKENS=tokens, AT_ONCE=4, num_warps=1)
    with GRADIENT.force(config, D=64):
        compared = CASE.compare(device)
    assert [one.name for one in compared] == ["y", "grad weight"]
    assert all(one.passed for one in compared), [str(one) for one in compared]
