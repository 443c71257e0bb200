"""Tables of addresses on a device, for one launch that works on many tensors."""

from __future__ import annotations

from collections import OrderedDict
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
    """Tables of int64 by what is in them; the last `KEPT` stay, since addresses return.

    A graph replays with the table that its capture saw. So a table that a capture uses is kept
    for good (some kilobytes each); one made during a capture is filled by the graph, each time
    it is replayed, and therefore not handed to any other call. Its pinned memory was set aside
    by the first call before the capture, since allocating some may be refused there.
    """

    KEPT = 64

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[torch.device, Rows], Table] = OrderedDict()
        self._captured: list[Table] = []
        self._spare: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def table(self, rows: Rows, device: torch.device) -> torch.Tensor:
        """Rows of n numbers on a device, each padded to a power of two (rows, n')."""
        key = (device, rows)
        capturing = _capturing(device)
        found = self._recent.get(key)
        if capturing:
            found = found or self._made(rows, device, capturing)
            self._captured.append(found)
            return found.on_device
        if found is None:
            found = self._recent[key] = self._made(rows, device, capturing)
        self._set_aside(tuple(found.source.shape), device)
        self._recent.move_to_end(key)
        if len(self._recent) > self.KEPT:
            self._recent.popitem(last=False)
        return found.on_device

    def _set_aside(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Pinned memory for the tables of a later capture, in one piece."""
        spare = self._spare.setdefault(shape, [])
        if _pinned(device) and len(spare) < max(1, self.KEPT // 2):
            spare.extend(_host_memory((self.KEPT, *shape), device))

    def _made(self, rows: Rows, device: torch.device, capturing: bool) -> Table:
        shape = (len(rows), next_power_of_2(len(rows[0])))
        spare = self._spare.get(shape)
        source = spare.pop() if capturing and spare else _host_memory(shape, device)
        source.fill_(ABOVE_ALL)
        source[:, : len(rows[0])] = torch.tensor(rows, dtype=torch.int64)
        on_device = torch.empty(shape, dtype=torch.int64, device=device)
        on_device.copy_(source, non_blocking=True)
        return Table(on_device, source)


def _pinned(device: torch.device) -> bool:
    return device.type == "cuda"


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _host_memory(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, pin_memory=_pinned(device))


TABLES = Tables()
