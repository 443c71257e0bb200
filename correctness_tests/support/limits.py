"""What kernels are known to spill, and where they do not compile: a list that may not grow.

A kernel keeps within a chip's limits (`tinyllama.harness.kernels.resources`), or an entry in its
op's ``limits.toml`` says on which chip, under which triton, by how much it does not, and why. An
entry that is not needed, or allows more than is measured, is an error: it would hide the next one.

    measured = ["3.6", "3.9"]            # minor versions of triton with all their entries

    [[known]]
    kernel = "backward_kernel"           # a function of the op
    chip = "gfx942"
    triton = "3.9"
    when = { HEAD = 128, q = "*fp32" }   # constants and types of arguments; the rest is free
    spilled = 64                         # bytes a thread, at most; without it: does not compile
    why = "..."
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllama.harness.kernels.resources import CHIPS, Compilation, Resources
from tinyllama.harness.machine.parsed import toml_of

FILE = "limits.toml"


@dataclass(frozen=True)
class Known:
    """An entry: a kernel (``op.function``), a chip, a minor version of triton.

    when: the constants and types it holds for, by the kernel's argument names; the rest is free.
    spilled: the bytes a thread spills, at most; None where the kernel does not compile.
    """

    kernel: str
    chip: str
    triton: str
    when: Mapping[str, Any]
    why: str
    spilled: int | None = None

    def covers(self, compilation: Compilation) -> bool:
        """Whether it is an entry for this kernel on this chip."""
        same = (self.kernel, self.chip) == (compilation.kernel, compilation.chip.name)
        return same and all(compilation.traits.get(k) == v for k, v in self.when.items())

    def __str__(self) -> str:
        when = ", ".join(f"{name}={value}" for name, value in self.when.items())
        return f"{self.kernel}({when}) on {self.chip}, triton {self.triton}"


@dataclass(frozen=True)
class Limits:
    """The entries, and the minor versions of triton for which all of them were measured."""

    entries: tuple[Known, ...] = ()
    measured: tuple[str, ...] = ()

    def of(self, triton: str) -> list[Known]:
        """The entries for a version; for one that was not measured, those of every version."""
        if triton not in self.measured:
            return list(self.entries)
        return [entry for entry in self.entries if entry.triton == triton]


def of_op(op: str, folder: Path | None) -> Limits:
    """What an op declares of its kernels; nothing where its folder has no such file."""
    if folder is None or not (folder / FILE).is_file():
        return Limits()
    return load(folder / FILE, op)


def load(path: Path, op: str) -> Limits:
    """The limits of an op's file; ValueError names what is wrong in it."""
    try:
        content = toml_of(path.read_text(encoding="utf-8"))
        measured = tuple(content.get("measured", ()))
        return Limits(tuple(_entry(op, measured, **e) for e in content.get("known", ())), measured)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _entry(op: str, measured: tuple[str, ...], kernel: str, **values: Any) -> Known:
    entry = Known(f"{op}.{kernel}", **values)
    if entry.chip not in CHIPS:
        raise ValueError(f"{entry}: no such chip: use one of {', '.join(CHIPS)}")
    if entry.triton not in measured:
        raise ValueError(f"{entry}: this triton is not in measured: add it")
    if not entry.why.strip():
        raise ValueError(f"{entry}: say why")
    return entry


def triton_minor() -> str:
    """The minor version whose code is compiled here: "3.9"."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def verdict(
    compilation: Compilation, allowed: Iterable[Known]
) -> tuple[list[str], Resources | None]:
    """Compile; what passes a limit and is not allowed, in words, and what the kernel takes."""
    entries = [entry for entry in allowed if entry.covers(compilation)]
    spilled = max((entry.spilled or 0 for entry in entries), default=0)
    excesses, taken = compilation.verdict(spilled)
    if taken is None and any(entry.spilled is None for entry in entries):
        return [], None
    return excesses, taken


def suggestion(compilation: Compilation, taken: Resources | None, triton: str) -> str:
    """The entry that would allow what was measured; its conditions may be fewer, its reason is
    missing."""
    when = {
        name: value
        for name, value in compilation.traits.items()
        if isinstance(value, int) or str(value).startswith("*") or (name.isupper() and value)
    }
    pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in when.items())
    spilled = f"spilled = {taken.spilled}\n" if taken else ""
    function = compilation.kernel.partition(".")[2]
    return (
        f'[[known]]\nkernel = "{function}"\nchip = "{compilation.chip.name}"\n'
        f'triton = "{triton}"\nwhen = {{ {pairs} }}\n{spilled}why = ""\n'
    )


def stale(entry: Known, compilations: Iterable[Compilation]) -> str | None:
    """Why an entry must be changed or removed; None when it is still needed as it is."""
    covered = [compilation for compilation in compilations if entry.covers(compilation)]
    if not covered:
        return f"{entry}: no provider launches this any more: remove it"
    taken = [verdict(compilation, [entry])[1] for compilation in covered]
    if entry.spilled is None:
        return None if None in taken else f"{entry}: it compiles now: remove the entry"
    worst = max(resources.spilled if resources else 0 for resources in taken)
    if worst < entry.spilled:
        return f"{entry}: spills {worst} bytes now, not {entry.spilled}: lower it or remove it"
    return None
