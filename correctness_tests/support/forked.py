"""Processes for specifications of what a program does, not of how its interpreter starts.

A fresh interpreter imports torch in 1.2 s of processor time. These are forked from one that has.
"""

import faulthandler
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from tinyllama.harness.machine import worker
from tinyllama.harness.measure import cache
from tinyllama.profiling import running


def forkserver() -> Any:
    """A context of multiprocessing whose processes have imported what takes long."""
    context = multiprocessing.get_context("forkserver")
    # Under a dispatch mode the first random number imports torch._dynamo.
    context.set_forkserver_preload(["correctness_tests.support.forked", "torch._dynamo"])
    return context


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and profiled programs that are started in the test are forks."""
    for module in (worker, running):
        replaced = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
        monkeypatch.setattr(module, "subprocess", replaced)


def flush_little() -> None:
    """From now on what is timed on the CPU in this process begins with warm caches: no time counts
    here, and where a machine reports hundreds of MiB of cache a flush takes 0.1 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "last_level_bytes", lambda device: 2**16)
        cache.flush_of(torch.device("cpu"))


class Forked:
    """``python -m MODULE ARGUMENTS``, in the place of `subprocess.Popen`.

    pass_fds: one descriptor at most, which is the first argument.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[bytes] | IO[str],
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        **_: int,
    ) -> None:
        at = argv.index("-m") + 1
        assert argv[0] == sys.executable
        connections = [Connection(os.dup(descriptor)) for descriptor in pass_fds]
        words = list(argv[at : at + 1]) + list(argv[at + 1 + len(connections) :])
        if words[0] == "tinyllama.harness.machine.worker":
            words[1] = "0"  # it is the server's child, and ends with its connection
        self._process = forkserver().Process(
            target=_run, args=(words, connections, str(stdout.name), dict(env), cwd)
        )
        self._process.start()
        for connection in connections:
            connection.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return self._process.exitcode


def _run(
    words: Sequence[str],
    connections: Sequence[Connection],
    output: str,
    env: Mapping[str, str],
    cwd: Path | None,
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    sys.path[:0] = map(os.path.abspath, env["PYTHONPATH"].split(os.pathsep))
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    with open(output, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    faulthandler.enable()
    flush_little()
    module, *rest = words
    sys.argv = [module, *(str(os.dup(connection.fileno())) for connection in connections), *rest]
    for connection in connections:
        connection.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
