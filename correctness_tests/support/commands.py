"""Command lines, for the specifications of the command line."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinyllama as package
from tinyllama import cli

TINY = ["train", "--preset", "tiny", "--batch-size", "2", "--seq-len", "8", "--device", "cpu"]
SHORT = [*TINY, "--num-steps", "2"]
ROOT = Path(package.__file__).parents[1]
# One thread: other tests run beside, and threads that wait for each other take minutes.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status, and what it printed."""

    status: int
    out: str
    err: str


def tinyllama(*argv: str | Path) -> Done:
    """Run a command in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = cli.main([str(word) for word in argv])
    return Done(status, out.getvalue(), err.getvalue())


def printed(*argv: str | Path) -> str:
    """What a command prints that does what is asked: status 0."""
    done = tinyllama(*argv)
    assert done.status == 0, done.err
    return done.out


def refused(*argv: str | Path) -> str:
    """What a command says that cannot do what is asked: status 2, one line, and nothing else."""
    done = tinyllama(*argv)
    (line,) = done.err.splitlines()
    assert line.startswith("tinyllama: error: ")
    assert (done.status, done.out) == (2, "")
    return line


def ran(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, keep what it prints, and wait for it; options as of `subprocess.run`."""
    options = {"env": ENVIRONMENT, "check": False, **options}
    return subprocess.run(argv, capture_output=True, text=True, **options)


def python(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own and wait for it; options as of `subprocess.run`."""
    return ran(sys.executable, *argv, **options)
