"""A side branch: work beside the current stream, joined again before anything else reads it."""

import contextlib
import functools
from collections.abc import Callable, Iterator

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
        self._in_use: list[object] = []

    @contextlib.contextmanager
    def branch(self, keep: object = None) -> Iterator[None]:
        """Queue what is launched inside on the branch, behind all that was launched so far.
        keep: what holds the tensors that it reads and nothing else may hold until `join`."""
        if self._stream is None:
            yield
            return
        self._in_use.append(keep)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """This point of the branch, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, point: torch.cuda.Event | None) -> None:
        """Make the current stream wait for a point of the branch."""
        if point is not None:
            torch.cuda.current_stream(self._device).wait_event(point)

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        if self._stream is not None and self._in_use:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._in_use.clear()

    def both(self, main: Callable[[], object], branch: Callable[[], object]) -> None:
        """Call two functions whose launches run at the same time, after all earlier launches:
        ``main`` first, on the current stream, then ``branch`` on the branch. The current stream
        waits for both, after an error too, so the memory that they use may be freed."""
        if self._stream is None:
            main()
            branch()
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            main()
            with torch.cuda.stream(self._stream):
                branch()
        finally:
            current.wait_stream(self._stream)
