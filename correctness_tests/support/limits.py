"""What kernels are known to spill: a list that may not grow.

A kernel keeps within a chip's limits (`tinyllama.harness.kernels.resources`) and spills at most 64
bytes a thread, or an entry in its op's ``limits.toml`` says on which chip, under which triton, by
how much it does not, and why. An entry that is not needed, or allows more than is measured, is an
error: it would hide the next one.

    measured = ["3.6", "3.9"]            # minor versions of triton with all their entries

    [[known]]
    kernel = "backward_kernel"           # a function of the op
    chip = "gfx942"
    triton = "3.9"
    when = { HEAD = 128, q = "*fp32" }   # constants and types of arguments; the rest is free
    spilled = 88                         # bytes a thread, at most
    why = "..."
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tinyllama.harness.kernels.resources import CHIPS, Compilation, Resources
from tinyllama.harness.machine.parsed import toml_of

FILE = "limits.toml"
FEW = 64  # bytes a thread: each triton spills other such handfuls; a time judges them


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry; its kernel is ``op.function`` once it is loaded."""

    kernel: str
    chip: str
    triton: str
    when: dict[str, Any]
    why: str
    spilled: int

    def covers(self, compilation: Compilation) -> bool:
        """Whether it is an entry for this kernel on this chip."""
        same = (self.kernel, self.chip) == (compilation.kernel, compilation.chip.name)
        return same and all(compilation.traits.get(k) == v for k, v in self.when.items())

    def __str__(self) -> str:
        when = ", ".join(f"{name}={value}" for name, value in self.when.items())
        return f"{self.kernel}({when}) on {self.chip}, triton {self.triton}"


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """The entries, and the minor versions of triton for which all of them were measured."""

    known: list[Known] = []
    measured: list[str] = []

    def of(self, triton: str) -> list[Known]:
        """The entries for a version; for one that was not measured, those of every version."""
        unknown = triton not in self.measured
        return [entry for entry in self.known if unknown or entry.triton == triton]


def of_op(op: str, folder: Path | None) -> Limits:
    """What an op declares of its kernels; nothing where its folder has no such file.

    ValueError names a file in which something is wrong.
    """
    if folder is None or not (folder / FILE).is_file():
        return Limits()
    try:
        limits = msgspec.convert(toml_of((folder / FILE).read_text(encoding="utf-8")), Limits)
    except ValueError as error:
        raise ValueError(f"{folder / FILE}: {error}") from error
    for entry in limits.known:
        named = entry.chip in CHIPS and entry.triton in limits.measured and entry.why.strip()
        if not named or entry.spilled <= FEW:
            lacking = f"name a chip, a measured triton, a reason and more than {FEW} bytes"
            raise ValueError(f"{folder / FILE}: {entry}: {lacking}")
    limits.known = [
        msgspec.structs.replace(entry, kernel=f"{op}.{entry.kernel}") for entry in limits.known
    ]
    return limits


def triton_minor() -> str:
    """The minor version whose code is compiled here: "3.9"."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def verdict(
    compilation: Compilation, allowed: Iterable[Known]
) -> tuple[list[str], Resources | None]:
    """Compile; what passes a limit and is not allowed, in words, and what the kernel takes."""
    entries = [entry for entry in allowed if entry.covers(compilation)]
    return compilation.verdict(max((entry.spilled for entry in entries), default=FEW))


def stale(entry: Known, compilations: Iterable[Compilation]) -> str | None:
    """Why an entry must be changed or removed; None when it is still needed as it is."""
    covered = [compilation for compilation in compilations if entry.covers(compilation)]
    if not covered:
        return f"{entry}: no provider launches this any more: remove it"
    taken = [verdict(compilation, [entry])[1] for compilation in covered]
    worst = max(resources.spilled if resources else 0 for resources in taken)
    if worst < entry.spilled:
        return f"{entry}: spills {worst} bytes now, not {entry.spilled}: lower it or remove it"
    return None
