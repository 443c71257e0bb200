"""A file of ops, as a repository of one's own has it, and git there."""

import os
import subprocess

import pytest

OP = """
import torch

from tinyllama.harness import Case, Op, Tensor

{name} = Op(
    "{name}",
    inputs={{"x": Tensor("N D", grad=True)}},
    outputs={{"y": "N D"}},
    cases=[Case(N=3, D=8)],
    timed=[Case(N=16, D=8)],
    bytes={{"forward": lambda size, N, D: 2 * N * D * size,
           "backward": lambda size, N, D: 2 * N * D * size}},
    flops={{"forward": lambda N, D: N * D, "backward": lambda N, D: N * D}},
)


@{name}.reference
def eager(x):
    return 2.0 * x


@{name}.provider("sum")
def added(x):
    return {body}
"""


def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """git as it is where nobody set anything but an author."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


def git(*args: str) -> str:
    run = subprocess.run(["git", *args], capture_output=True, check=True, text=True)
    return run.stdout.strip()
