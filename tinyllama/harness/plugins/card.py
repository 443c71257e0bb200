"""The GPUs of a session that times: no other such session, and no gate, has them meanwhile."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from tinyllama.harness.gate.device_guard import device_lock

WAIT = 180.0  # seconds for another session or gate to end


class Card:
    """Holds GPUs until `release`. A CPU is not held: other work always shares it.

    waiting: is told whom it waits for.
    """

    def __init__(self, waiting: Callable[[str], None] = lambda reason: None) -> None:
        self._waiting = waiting
        self._lock = ExitStack()
        self._held: set[torch.device] = set()

    def hold(self, device: torch.device, wait: float = WAIT) -> None:
        """Hold a GPU, once it is free; one that is held already stays so.

        Raises BusyError when another process has it for ``wait`` seconds.
        """
        if device.type != "cpu" and device not in self._held:
            self._lock.enter_context(device_lock(device, wait, self._waiting))
            self._held.add(device)

    def release(self) -> None:
        self._lock.close()
        self._held.clear()


def gpus() -> list[torch.device]:
    """Those that this process sees."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
