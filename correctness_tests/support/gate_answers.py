"""What devices and workers are made to say in specifications of the gate; see `gate_fakes`."""

from __future__ import annotations

from correctness_tests.support.gate_fakes import QUIET, VERSIONS
from tinyllama.harness.gate.noise import Block, Noise
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.op_contender import WrongResultError


def history(*names: str, spread: float = QUIET, blocks: int = 40) -> Noise:
    """That of a device on which equal sides differ by so much from block to block."""
    noise = Noise("a device")
    for number in range(blocks):
        value = spread if number % 2 else -spread
        statistics = {name: {DEVICE: value, HOST: value} for name in names}
        date = f"2030-01-01T00:00:{number:02}Z"
        noise.add(Block(date, "c0ffee", dict(VERSIONS), 16, statistics))
    return noise


def wrong(benchmark: str = "a") -> WorkerError:
    """What a worker says of a wrong result."""
    types = [f"{WrongResultError.__module__}.{WrongResultError.__qualname__}"]
    return WorkerError(f"WrongResultError: {benchmark}-eager: y: error 1 > 0.1", types=types)


def died() -> WorkerError:
    """What is said of a process that ended."""
    return WorkerError("the process of a side ended with status -11")


def hung() -> WorkerError:
    """What is said of a process that did not answer in time, and was ended."""
    return WorkerError("a side did not answer call in 60 s")
