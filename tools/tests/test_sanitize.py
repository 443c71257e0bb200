"""`tools.sanitize` says what it lacks, and plants the fault that its tool must see."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import ROOT
from tools import sanitize


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--only", "rope,nope"], "'nope' does not exist"),
        ([], "compute-sanitizer is not on the PATH"),
    ],
)
def test_missing_tool_or_op_is_status_2_with_reason(
    words: list[str], reason: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tools.sanitize", *words]
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


def test_planted_kernel_stores_beyond_its_buffer() -> None:
    """So a sanitizer that finds nothing in it sees nothing."""
    pytest.importorskip("triton")
    x, wide = torch.ones(100), torch.full((128,), 7.0)
    sanitize.stray_kernel[(1,)](x, wide, 100)
    assert wide[99:102].tolist() == [1, 0, 7]
