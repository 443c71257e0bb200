"""Attention held to one backend of torch, as a peer of ours."""

import pytest

from correctness_tests.support.commands import python

# In a process of its own: the peers are providers of the tree's ops from then on.
COMPARED = """
import torch
from tinyllama.bench.measure_ops import PACKAGE, PEER_FILES
from tinyllama.harness.measure.op_contender import ops_of

attention = ops_of(PACKAGE, PEER_FILES)["attention"]
q, k, v = (torch.randn(2, 40, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
flash, torchs = (attention(q, k, v, provider=name) for name in ("flash", "torch"))
assert torch.equal(flash, torchs)
attention(q, k, v, provider="cudnn")
"""


@pytest.mark.long
def test_attention_by_a_backend_is_that_backend_or_an_error() -> None:
    """A CPU has a flash kernel, and no cuDNN."""
    done = python("-c", COMPARED)
    assert "ValueError: CUDNN_ATTENTION does not take q, k, v of (2, 40, 4, 16)" in done.stderr
