"""The processes that train one model together: this process's rank, and what all ranks must share.

`torchrun` starts them and sets variables of the environment; `joined` connects them by
torch.distributed. Without torchrun there is one rank, `ALONE`, and nothing is communicated.
"""

import contextlib
import gc
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tinyllama.harness.machine.device import usable_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure.clock import DeviceQueue, Queue, queue_of
from tinyllama.model.config import ConfigError

TIMEOUT = 600.0  # seconds that a rank waits for the others, compilation included
# An error of a lost connection has no type of its own in torch.
_LOST = re.compile("timed? ?out|connection (closed|reset|refused)|remote process", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``count`` processes. ``local`` numbers the processes of one machine.

    A rank that waits longer than ``seconds`` for the others gets an error.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    seconds: float = TIMEOUT

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def part(self, samples: int) -> slice:
        """This rank's part of so many samples. Raises ConfigError unless all parts are equal."""
        if samples % self.count:
            raise ConfigError(
                f"batch_size {samples} does not divide by {self.count} ranks: use a multiple of "
                f"{self.count}, or another number of ranks"
            )
        size = samples // self.count
        return slice(self.rank * size, (self.rank + 1) * size)

    def gathered(self, mine: Any) -> list[Any]:
        """What every rank passes here, in the order of the ranks: small plain data."""
        if self.count == 1:
            return [mine]
        all_of_them: list[Any] = [None] * self.count
        dist.all_gather_object(all_of_them, mine)
        return all_of_them

    def lost(self, why: str) -> ConnectionError:
        """The error of a rank that misses another one."""
        return ConnectionError(
            f"another rank has ended, or has not answered for {self.seconds:g} s: {why}"
        )

    def mean(self, numbers: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over the ranks, in the tensor's memory."""
        if self.count > 1:
            dist.all_reduce(numbers)
            numbers /= self.count
        return numbers

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Raise UsageError, on every rank, for a setting that is not the same on all of them."""
        first, *others = self.gathered(dict(settings))
        for rank, values in enumerate(others, 1):
            for name in (name for name in first if values[name] != first[name]):
                raise UsageError(
                    f"{name} is {first[name]!r:.300} on rank 0 and {values[name]!r:.300} on rank "
                    f"{rank}: start all ranks with the same options, data and versions"
                )


ALONE = Ranks()


def launched() -> Ranks:
    """What a launcher such as torchrun says in the environment; without one, `ALONE`.

    Raises UsageError for an environment that does not say it all.
    """
    if "RANK" not in os.environ:
        return ALONE
    try:
        return Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    except (LookupError, ValueError) as error:
        raise UsageError(
            f"the environment has RANK, and {error} is missing or no number: start with torchrun, "
            "or unset RANK"
        ) from None


def device_of(ranks: Ranks, named: str | None) -> torch.device:
    """The device of this rank: with several ranks, the GPU whose number is ``local``, or the CPU.

    Raises UsageError for one that is not there, or that several ranks would share.
    """
    device = usable_device(named)
    if ranks.count == 1 or device.type == "cpu":
        return device
    if str(device) != device.type:
        raise UsageError(
            f"--device {named} is one GPU, and there are {ranks.count} ranks: use --device cuda "
            "or leave it out, and each takes its own"
        )
    if ranks.local >= torch.cuda.device_count():
        raise UsageError(
            f"rank {ranks.rank} is number {ranks.local} on its machine, which has "
            f"{torch.cuda.device_count()} GPUs: start one process for each GPU "
            "(torchrun --nproc-per-node), or use --device cpu"
        )
    return torch.device(device.type, ranks.local)


class RankQueue(DeviceQueue):
    """The current stream of a GPU, for which a rank waits no longer than for the other ranks.

    PyTorch watches over collectives, but not over those of a captured step.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        super().__init__(device)
        self._ranks = ranks

    def synchronize(self) -> None:
        end, limit = self.mark(), self.now() + self._ranks.seconds
        while not end.query():
            if self.now() > limit:
                raise self._ranks.lost("a step does not end")
            time.sleep(0)


def queue_of_rank(device: torch.device, ranks: Ranks) -> Queue:
    """The queue in which a rank's steps run."""
    if ranks.count == 1 or device.type == "cpu":
        return queue_of(device)
    return RankQueue(device, ranks)


@contextlib.contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Connect the ranks, unless they are: by NCCL (or RCCL) between GPUs, and by gloo on CPUs.

    Raises ConnectionError where another rank has ended, or waits longer than the ranks' limit.
    After an error there is no orderly shutdown: it could wait for ranks that have died, and the
    process ends anyway.
    """
    if ranks.count == 1 or dist.is_initialized():
        yield
        return
    on_gpu = device.type != "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        f"cpu:gloo,{device.type}:nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=ranks.seconds),
        device_id=device if on_gpu else None,
    )
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise ranks.lost(str(error)) from error
    gc.collect()  # NCCL's communicator ends only after the graphs that captured its collectives
    dist.destroy_process_group()
