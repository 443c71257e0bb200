"""A job of two ranks, one of which gets a signal in the middle: does the job end, and how?

    python -m correctness_tests.support.stopped_rank FOLDER SIGNAL LIMIT WITHIN [OPTION ...]

SIGNAL: such as SIGSTOP; LIMIT: the seconds that a rank waits for the other; WITHIN: those that the
job has in all; OPTION: of `tinyllama train`. A checkpoint after each step shows how far the job is.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinyllama.training import checkpoint
from tinyllama.training.answering import parent

LAUNCH = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    *("-m", "tinyllama", "train", "--num-steps", "1000000", "--save-every", "1"),
)
STEPS = 3  # before the signal
SOON = 5.0  # seconds in which processes end that wait for those of the job


@dataclass(frozen=True)
class Ended:
    """seconds: from the signal to the job's end. left: processes of the job that are there `SOON`
    after that."""

    status: int
    seconds: float
    printed: str
    left: list[int]
    checkpoint: Path


def signalled(
    folder: Path, sent: signal.Signals, limit: int, within: float, *options: str, rank: int = 1
) -> Ended:
    """Start a job, send this rank a signal after `STEPS` steps, and wait for the job's end. Raises
    TimeoutError, and kills the job, if it lasts longer than ``within`` seconds."""
    kept, output = folder / "kept.safetensors", folder / "output"
    words = [*LAUNCH, "--save", str(kept), "--rank-timeout", str(limit), *options]
    # By this the processes of the job are found, also those that it leaves.
    mark = f"STOPPED_RANK_JOB={folder}"
    name, _, value = mark.partition("=")
    own = {"OMP_NUM_THREADS": "1", name: value}
    end = time.monotonic() + within
    with output.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, *words], env=os.environ | own, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        saved: set[int] = set()

        def enough() -> bool:
            if job.poll() is not None:
                raise RuntimeError(f"the job ended by itself:\n{output.read_text()}")
            if kept.is_file():
                saved.add(kept.stat().st_mtime_ns)
            return len(saved) >= STEPS

        _wait(enough, end, output)
        (process,) = [  # a rank may have started others, which compile
            one
            for one in _processes(mark)
            if f"RANK={rank}" in _environment(one) and parent(one) == job.pid
        ]
        os.kill(process, sent)
        since = time.monotonic()
        _wait(lambda: job.poll() is not None, end, output)
        ended = time.monotonic()
        while _processes(mark) and time.monotonic() < ended + SOON:
            time.sleep(0.01)
        return Ended(job.wait(), ended - since, output.read_text(), _processes(mark), kept)
    finally:
        for one in _processes(mark):
            os.kill(one, signal.SIGKILL)
        job.wait()


def _wait(until: Callable[[], bool], end: float, output: Path) -> None:
    while not until():
        if time.monotonic() > end:
            raise TimeoutError(f"the job has not ended:\n{output.read_text()}")
        time.sleep(0.01)


def _environment(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def _processes(mark: str) -> list[int]:
    numbers = (int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit())
    return [one for one in numbers if mark in _environment(one)]


def _main(folder: str, sent: str, limit: str, within: str, *options: str) -> None:
    numbers = int(limit), float(within)
    ended = signalled(Path(folder), signal.Signals[sent], *numbers, *options)
    print(ended.printed[-6000:])
    kept = checkpoint.load(ended.checkpoint)
    print(
        f"{sent} {' '.join(options)}: status {ended.status} after {ended.seconds:.1f} s, left "
        f"{ended.left}, checkpoint of {kept.steps} steps, checksum {kept.checksummed}"
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
