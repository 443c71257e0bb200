"""Programs of one launch that wait for each other: barriers, and a watchdog over them.

A cooperative launch starts only if all of its programs can run at the same time, so that one may
wait for what another writes. A kernel that is made of phases takes PHASE as a constant: `ALL` runs
every phase, with a barrier (`meet`) behind each but the last; a number runs that phase alone. The
interpreter runs programs one after the other, so there the phases are launches of their own
(`phases`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tinyllama.harness.kernels.launch import jit, tl

EVERY = -1
ALL: Any = tl.constexpr(EVERY)
APART = 32  # numbers between two counters: each has 128 bytes, a line of the cache, to itself


@jit
def meet(counter, expected, spins, status, code, opened):  # type: ignore[no-untyped-def]
    """A barrier: -> 1 once ``counter`` (int32) has reached ``expected``, after which all that the
    programs stored before they counted is seen; else 0, after looking ``spins`` times, and
    ``code`` is stored in ``status`` unless there is one. A program whose last barrier stayed closed
    (``opened`` 0) neither counts nor waits."""
    tl.debug_barrier()  # every thread's stores come before the count
    tl.atomic_add(counter, opened, sem="release", scope="gpu")
    looked = 0
    while (looked < spins * opened) & (tl.load(counter, volatile=True) < expected):
        looked += 1
    count = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    still = opened * (count >= expected).to(tl.int32)
    if still < opened:
        tl.atomic_cas(status, 0, code)
    return still


def phases(device: torch.device, count: int) -> Iterable[int]:
    """The values of PHASE that a kernel of so many phases is launched with, one after the other."""
    return range(count) if device.type == "cpu" else (EVERY,)


def cooperative(device: torch.device) -> dict[str, Any]:
    """Options of a launch whose programs wait for each other."""
    return {} if device.type == "cpu" else {"launch_cooperative_grid": True}


class Watchdog:
    """What barriers report that did not open. describe: a code of `meet` in words.

    Results that follow such a barrier are to be NaN: they are why somebody calls `check`.
    """

    def __init__(self, describe: Callable[[int], str], spins: int = 1 << 22) -> None:
        self.describe = describe
        self.spins = spins  # looks at a counter, of 0.5 us or more each, before a program gives up
        self._status: dict[torch.device, torch.Tensor] = {}

    def status(self, device: torch.device) -> torch.Tensor:
        """Where kernels on this device store a code (1), int32; 0 where every barrier opened."""
        if device not in self._status:
            with torch.inference_mode(False):  # `fault` changes it outside, too
                self._status[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._status[device]

    def fault(self, device: torch.device) -> str | None:
        """Which barrier was the first that did not open since the last call; None if all did."""
        status = self._status.get(device)
        code = 0 if status is None else int(status.item())
        if status is None or not code:
            return None
        status.zero_()
        return self.describe(code)

    def check(self, device: torch.device) -> None:
        """Raise RuntimeError with what `fault` finds."""
        if fault := self.fault(device):
            raise RuntimeError(fault)
