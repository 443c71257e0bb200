"""A side branch: work beside the current stream, joined again before anything else reads it."""

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Side:
    """A branch beside the current stream of a GPU; elsewhere all runs in one order.

    Captured, the branch is part of the graph. What it reads and writes must live until `join`:
    memory that is freed before is handed out to the current stream, which runs at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._kept: list[object] = []

    @contextlib.contextmanager
    def branch(self, keep: object = None) -> Iterator[None]:
        """Queue what is launched inside on the branch, behind all that was launched so far.
        keep: what holds the tensors that it reads and nothing else may hold until `join`."""
        if self._stream is None:
            yield
            return
        self._kept.append(keep)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        if self._stream is not None and self._kept:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._kept.clear()
