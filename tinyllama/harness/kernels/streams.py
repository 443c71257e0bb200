"""A side branch: work beside the current stream, joined again before anything else reads it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0)


class Side:
    """A branch beside the current stream of a GPU; elsewhere all runs in one order.

    Captured, the branch is part of the graph. What it reads must live until `join`: memory that is
    freed before is handed out again to the current stream, which runs at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._ends: dict[int, torch.cuda.Event] = {}
        self._held: list[torch.Tensor] = []

    @contextlib.contextmanager
    def branch(self, name: int, *reads: torch.Tensor) -> Iterator[None]:
        """Queue what is launched inside on the branch, behind all that was launched so far. reads:
        what it reads, which lives until `join`."""
        self._held.extend(reads)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._ends[name] = torch.cuda.Event()
            self._ends[name].record()

    def wait(self, name: int) -> None:
        """Make the current stream wait for the end of a part, if there was one of that name."""
        if name in self._ends:
            torch.cuda.current_stream(self._device).wait_event(self._ends[name])

    def join(self) -> None:
        """Make the current stream wait for the whole branch."""
        for end in list(self._ends)[-1:]:
            self.wait(end)
        self._held.clear()
