"""A contender of a group of training steps: what it is called, and how its worker makes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllama.bench.workloads import Group, not_beside
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.machine.worker import Worker


@dataclass(frozen=True)
class Contender:
    """How a contender of a group is made in its worker.

    role: ``tier``, ``peer``, ``client`` (somebody else's step with our ops) or ``floor``. factory:
    ``module:name``, called with ``arguments``. requires: capabilities of the device; see
    `tinyllama.harness.machine.device.cannot`.
    preload: modules that its process imports first. only: the groups it is tried in, and why.
    alone: nothing else is made at the same time, since it compares times on the device to choose
    its kernels. torch.compile's default mode does so too, but it compares few configurations of a
    kernel by the smallest of many readings, so one undisturbed reading is enough.
    """

    name: str
    title: str
    role: str
    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    only: tuple[tuple[str, ...], str] | None = None
    alone: bool = False

    def about(self, group: Group) -> dict[str, Any]:
        """The fields that every entry of this contender has."""
        return {**vars(group), "contender": self.name, "role": self.role}

    def worker(self) -> Worker:
        """A process for it, which imports its modules while nobody waits."""
        return Worker(self.name, preload=[self.factory.partition(":")[0], *self.preload])

    def cannot(self, device: torch.device, group: str) -> str | None:
        """Why it does not run on a device; None when it does."""
        if self.only is not None and group not in self.only[0]:
            return self.only[1]
        if reason := not_beside(self.name, group):
            return reason
        return next(filter(None, (cannot(need, device) for need in self.requires)), None)
