"""How the collectives of several ranks share a GPU with the computation beside them.

A collective's kernel occupies some of a GPU's multiprocessors until it ends. A matrix product that
starts meanwhile with a program for each multiprocessor runs in two waves and takes almost twice as
long, however few of them the collective has. So there are two ways: short collectives on many
multiprocessors, or collectives on few and products that leave these free (``spare``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tinyllama.model.config import ConfigError


@dataclass(frozen=True)
class Sharing:
    """processors: at most so many multiprocessors run a collective; None: the backend's choice.
    urgent: whether its kernels come before others that wait for multiprocessors.
    spare: so many are left free by the matrix products of the backward pass.
    bucket_mib: the size of the gradients that are reduced together; None: those of a block.
    early: whether parameters are updated while the last gradients are still being reduced.
    """

    processors: int | None = None
    urgent: bool = False
    spare: int = 0
    bucket_mib: float | None = None
    early: bool = True
    copies: bool = False

    def __post_init__(self) -> None:
        for name, least in (("processors", 1), ("spare", 0), ("bucket_mib", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} {value} is too small: use at least {least}")

    def __str__(self) -> str:
        size = "block" if self.bucket_mib is None else f"{self.bucket_mib:g} MiB"
        parts = [f"buckets of a {size}" if size == "block" else f"buckets of {size}"]
        if self.processors is not None:
            parts.append(f"{self.processors} processors")
        if self.urgent:
            parts.append("urgent")
        if self.spare:
            parts.append(f"{self.spare} spared")
        if self.copies:
            parts.append("copies")
        return ", ".join([*parts, *(["early update"] if self.early else [])])

    def group(self, device: torch.device) -> dist.ProcessGroup | None:
        """The process group that reduces gradients; None: the default one. All ranks call it
        together. Raises ConfigError where the backend has no such settings.
        """
        plain = self.processors is None and not self.urgent
        return None if plain else _group(self.processors, self.urgent, device)

    @contextlib.contextmanager
    def sparing(self) -> Iterator[None]:
        """Matrix products that are launched inside leave ``spare`` multiprocessors free.

        Raises ConfigError where PyTorch cannot do this.
        """
        if not self.spare:
            yield
            return
        if not (torch.cuda.is_available() and hasattr(torch._C, "_set_sm_carveout_experimental")):
            raise ConfigError(
                f"spare {self.spare}: this PyTorch cannot limit matrix products on this device; "
                "use spare 0"
            )
        blas, before = torch.backends.cuda.preferred_blas_library, _carveout()
        library = blas()
        blas("cublaslt")  # or hipBLASLt: the one that takes a limit
        torch._C._set_sm_carveout_experimental(self.spare)
        try:
            yield
        finally:
            torch._C._set_sm_carveout_experimental(before)
            blas(library)


def _carveout() -> int | None:
    return torch._C._get_sm_carveout_experimental()


@functools.cache
def _group(processors: int | None, urgent: bool, device: torch.device) -> dist.ProcessGroup:
    if device.type == "cpu":
        raise ConfigError(
            f"processors {processors}, urgent {urgent}: ranks on CPUs reduce by gloo, which has "
            "neither; leave them out"
        )
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    if processors is not None:
        options.config.min_ctas, options.config.max_ctas = 1, processors
    group: Any = dist.new_group(backend="nccl", pg_options=options)
    return group
