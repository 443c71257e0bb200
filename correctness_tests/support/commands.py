"""Command lines, for the specifications of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinyllama
from tinyllama import cli

TINY = ["train", "--preset", "tiny", "--batch-size", "2", "--seq-len", "8", "--device", "cpu"]
SHORT = [*TINY, "--num-steps", "2"]
ROOT = Path(tinyllama.__file__).parents[1]
# One thread: other tests run beside, and threads that wait for each other take minutes.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command says that cannot do what is asked: status 2, one line, and nothing else."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("tinyllama: error: ")
    assert out == ""
    return line


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own and wait for it."""
    return subprocess.run(
        [sys.executable, *argv], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
