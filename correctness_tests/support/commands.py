"""Command lines, for the specifications of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tinyllama

TINY = ["train", "--preset", "tiny", "--batch-size", "2", "--seq-len", "8", "--device", "cpu"]
SHORT = [*TINY, "--num-steps", "2"]
ROOT = Path(tinyllama.__file__).parents[1]
# One thread: other tests run beside, and threads that wait for each other take minutes.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own and wait for it."""
    return subprocess.run(
        [sys.executable, *argv], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
