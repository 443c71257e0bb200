"""Which ranks still answer: each counts in the job's store, and looks whether the others do.

A collective that waits for a process that is stopped, or lost without a trace, does not say for
which, and a barrier inside a captured step cannot. So a thread of each rank watches all others.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

LOOKS = 20  # in the time that a rank waits for the others
SILENT = 15  # looks without an answer: fewer, so that the error comes before that of a collective
LEFT = -1  # instead of a count: this rank is done


class SilentRankError(RuntimeError):
    """A rank has not answered for too long."""


class Answering:
    """From `start` to `stop`, this process ends with an error that names the ranks whose processes
    have not run for ``SILENT / LOOKS`` of so many ``seconds``. It ends at once, whatever it does:
    what waits for a lost rank may never return. A silent process of the same launcher is killed: it
    does not take the SIGTERM by which launchers end a job, and torchrun would wait 30 s for it. The
    time of a rank that is itself stopped does not count. If the store is gone, nothing is watched:
    the launcher that holds it has ended.
    """

    def __init__(self, store: Any, rank: int, count: int, seconds: float) -> None:
        """store: of `torch.distributed`, used by nothing else at the same time."""
        self._store, self._rank = store, rank
        self._keys = [f"count of rank {each}" for each in range(count)]
        self._processes = [f"process of rank {each}" for each in range(count)]
        self._seconds = seconds / LOOKS
        self._silent = [0] * count  # looks in turn without an answer
        self._seen: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="answering", daemon=True)

    def start(self) -> None:
        self._store.set(self._keys[self._rank], "0")
        self._store.set(self._processes[self._rank], f"{socket.gethostname()} {os.getpid()}")
        self._thread.start()

    def stop(self, left: bool) -> None:
        """left: in order, so that the others stop to wait for this rank."""
        self._done.set()
        self._thread.join()
        if left:
            with contextlib.suppress(dist.DistError):  # the store's process may have ended before
                self._store.set(self._keys[self._rank], str(LEFT))

    def look(self, count: int) -> list[int]:
        """Answer, and look at the answers of the others; -> the ranks that are silent."""
        self._store.set(self._keys[self._rank], str(count))
        seen = [int(each) for each in self._store.multi_get(self._keys)]
        for rank, (now, before) in enumerate(zip(seen, self._seen or seen, strict=True)):
            moved = now != before or now == LEFT
            self._silent[rank] = 0 if moved else self._silent[rank] + 1
        self._seen = seen
        return [rank for rank, looks in enumerate(self._silent) if looks >= SILENT]

    def _watch(self) -> None:
        count = 0
        try:
            while not self._done.wait(self._seconds):
                count += 1
                if silent := self.look(count):
                    self._end(silent)
        except dist.DistError:
            return

    def _end(self, silent: list[int]) -> None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        names = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {silent} have"
        seconds = SILENT * self._seconds
        try:
            raise SilentRankError(
                f"{names} not answered for {seconds:g} s (seen by rank {self._rank}): a process "
                "that was stopped or killed, or a machine that is gone"
            )
        except SilentRankError as error:
            get_error_handler().record_exception(error)  # torchrun shows it as the cause
            print(f"tinyllama: error: {error}", file=sys.stderr, flush=True)
        # torchrun compares whole seconds, and must see the process that is killed as the second.
        time.sleep(1.1)
        with contextlib.suppress(dist.DistError, OSError):
            for where in self._store.multi_get([self._processes[rank] for rank in silent]):
                host, process = where.decode().split()
                if host == socket.gethostname() and parent(int(process)) == os.getppid():
                    os.kill(int(process), signal.SIGKILL)
        os._exit(1)


def parent(process: int) -> int | None:
    """The process that started this one; None if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])  # the name before may hold anything


def own_store() -> Any:
    """Another connection to the store by which torchrun connected the ranks."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"tinyllama answering {attempt}", store)
