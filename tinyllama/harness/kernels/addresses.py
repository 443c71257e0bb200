"""Tables of addresses on a device, for one launch that works on many tensors."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tinyllama.harness.kernels.launch import next_power_of_2

Rows = tuple[tuple[int, ...], ...]

ABOVE_ALL = torch.iinfo(torch.int64).max  # what a table is padded with


@dataclass(frozen=True)
class Table:
    """A table on the device, and the host's copy: a captured graph reads that in each replay."""

    on_device: torch.Tensor
    source: torch.Tensor


class Tables:
    """Tables of int64 by what is in them; the last `RECENT` stay, since addresses return.

    A graph replays with the table that its capture saw. So a table that a capture uses is kept
    for good (some kilobytes each). One made during a capture is filled by the graph, each time
    it is replayed, and therefore not handed to any other call; inside `filled_once` it is filled
    when the capture has ended. Its memory was set aside by the first call before the capture,
    since allocating some may be refused there, and what a graph allocates is not its own in every
    part of a replay.
    """

    RECENT = 64

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[torch.device, Rows], Table] = OrderedDict()
        self._captured: list[Table] = []
        self._spare: dict[tuple[torch.device, tuple[int, ...]], list[Table]] = {}
        self._unfilled: list[Table] | None = None

    @contextlib.contextmanager
    def filled_once(self) -> Iterator[None]:
        """Leave the copies of new tables to the host out of graphs that are captured inside: the
        tables are filled at the end, which must come before any replay."""
        self._unfilled = []
        try:
            yield
            for table in self._unfilled:
                table.on_device.copy_(table.source, non_blocking=True)
        finally:
            self._unfilled = None

    def table(self, rows: Rows, device: torch.device) -> torch.Tensor:
        """Rows of n numbers on a device, each padded to a power of two (rows, n')."""
        key = (device, rows)
        capturing = _capturing(device)
        table = self._recent.get(key)
        if capturing:
            table = table or self._new(rows, device, capturing)
            self._captured.append(table)
            return table.on_device
        if table is None:
            table = self._recent[key] = self._new(rows, device, capturing)
        self._set_aside(tuple(table.source.shape), device)
        self._recent.move_to_end(key)
        if len(self._recent) > self.RECENT:
            self._recent.popitem(last=False)
        return table.on_device

    def _set_aside(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Memory for the tables of a later capture, in one piece."""
        spare = self._spare.setdefault((device, shape), [])
        if _pinned(device) and len(spare) < max(1, self.RECENT // 2):
            several = (self.RECENT, *shape)
            on_device = torch.empty(several, dtype=torch.int64, device=device)
            spare.extend(map(Table, on_device, _host_memory(several, device)))

    def _new(self, rows: Rows, device: torch.device, capturing: bool) -> Table:
        shape = (len(rows), next_power_of_2(len(rows[0])))
        spare = self._spare.get((device, shape)) if capturing else None
        later = self._unfilled if spare else None
        table = spare.pop() if spare else _empty(shape, device)
        table.source.fill_(ABOVE_ALL)
        table.source[:, : len(rows[0])] = torch.tensor(rows, dtype=torch.int64)
        if later is None:
            table.on_device.copy_(table.source, non_blocking=True)
        else:
            later.append(table)
        return table


def _empty(shape: tuple[int, ...], device: torch.device) -> Table:
    on_device = torch.empty(shape, dtype=torch.int64, device=device)
    return Table(on_device, _host_memory(shape, device))


def _pinned(device: torch.device) -> bool:
    return device.type == "cuda"


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _host_memory(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, pin_memory=_pinned(device))


TABLES = Tables()
