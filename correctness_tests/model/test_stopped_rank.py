"""A rank whose process no longer runs ends the job within its limit, by an error that names it."""

import signal
from pathlib import Path

import pytest
import torch

from correctness_tests.support.stopped_rank import signalled
from tinyllama.training import checkpoint

TINY = ("--hidden-dim", "32", "--num-layers", "2", "--num-heads", "4", "--batch-size", "2")
LIMIT = 4  # seconds
BY = {
    "gloo": ("--device", "cpu", "--seq-len", "8"),
    **{
        f"{tier} by copies": ("--tier", tier, "--reduce", "copies", "--seq-len", "64")
        for tier in ("v3", "v4")
    },
}


@pytest.mark.parametrize(
    "name",
    ["gloo", *(pytest.param(name, marks=pytest.mark.gpu) for name in BY if name != "gloo")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_job_and_is_named(name: str, rank: int, tmp_path: Path) -> None:
    if name != "gloo" and torch.cuda.device_count() < 2:
        pytest.skip("ranks on GPUs need two")
    ended = signalled(tmp_path, signal.SIGSTOP, LIMIT, 300, *TINY, *BY[name], rank=rank)
    assert ended.status == 1
    assert f"error: rank {rank} has not answered for 3 s (seen by rank {1 - rank})" in ended.printed
    assert "SilentRankError" in ended.printed.partition("Root Cause")[2]
    assert ended.seconds < 25, "torchrun waits 30 s for a process that SIGTERM does not end"
    assert not ended.left
    kept = checkpoint.load(ended.checkpoint)
    assert kept.checksummed
    assert kept.steps >= 3
