"""What kernels are known to spill, and where they do not compile: a list that may not grow.

A kernel keeps within a chip's limits (`tinyllama.harness.kernels.resources`), or an entry in its
op's ``limits.toml`` says on which chip, under which triton, by how much it does not, and why. An
entry that is not needed, or allows more than is measured, is an error: it would hide the next one.

    measured = ["3.6", "3.9"]            # minor versions of triton that the entries are whole for

    unfit = [                            # configurations of a space that pass a limit: a search
        { space = "attention.forward",   # leaves them out. Their number over all keys of the
          chip = "gfx942",               # largest cases; `make test-slow` counts them
          triton = "3.9", count = 3, why = "..." },
    ]

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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tinyllama.harness.kernels.resources import CHIPS, Compilation, Resources
from tinyllama.harness.machine.parsed import toml_of


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
        """Whether it speaks of this kernel on this chip."""
        same = (self.kernel, self.chip) == (compilation.kernel, compilation.chip.name)
        return same and all(compilation.traits.get(k) == v for k, v in self.when.items())

    def __str__(self) -> str:
        when = ", ".join(f"{name}={value}" for name, value in self.when.items())
        return f"{self.kernel}({when}) on {self.chip}, triton {self.triton}"


def triton_minor() -> str:
    """The minor version whose code is compiled here: "3.9"."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class Unfit:
    """How many of a space's configurations pass a limit of a chip: a search leaves them out."""

    space: str
    chip: str
    triton: str
    count: int
    why: str


@dataclass(frozen=True)
class Limits:
    """The entries, and the minor versions of triton for which all of them were measured."""

    known: tuple[Known, ...] = ()
    unfit: tuple[Unfit, ...] = ()
    measured: tuple[str, ...] = ()

    def of(self, triton: str) -> list[Known]:
        """The entries for a version; for one that was not measured, those of every version."""
        if triton not in self.measured:
            return list(self.known)
        return [entry for entry in self.known if entry.triton == triton]


FILE = "limits.toml"


def of_op(op: str, folder: Path | None) -> Limits:
    """What an op declares of its kernels; nothing where its folder has no such file."""
    if folder is None or not (folder / FILE).is_file():
        return Limits()
    return load(folder / FILE, op)


def load(path: Path, op: str) -> Limits:
    """The limits of an op's file; ValueError names what is wrong in it."""
    try:
        content = toml_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if unknown := sorted(set(content) - {"known", "unfit", "measured"}):
        raise ValueError(
            f"{path}: unknown {', '.join(unknown)}: use measured, [[known]] and [[unfit]]"
        )
    measured = tuple(content.get("measured", ()))
    known, unfit = (
        tuple(
            _entry(kind, entry, f"{path}, {name} {n}", measured)
            for n, entry in enumerate(content.get(name, ()), 1)
        )
        for name, kind in (("known", Known), ("unfit", Unfit))
    )
    known = tuple(replace(entry, kernel=f"{op}.{entry.kernel}") for entry in known)
    return Limits(known, unfit, measured)


def _entry(kind: Any, entry: dict[str, Any], where: str, measured: Iterable[str]) -> Any:
    names = {field.name for field in fields(kind)}
    unknown, missing = set(entry) - names, names - set(entry) - {"spilled"}
    if unknown or missing:
        raise ValueError(f"{where}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    if entry["chip"] not in CHIPS:
        raise ValueError(f"{where}: no chip {entry['chip']!r}: use one of {', '.join(CHIPS)}")
    for name in ("spilled", "count"):
        number = entry.get(name, 1)
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{where}: {name} is {number!r}: a whole number, 1 or more")
    if not str(entry["why"]).strip():
        raise ValueError(f"{where}: say why")
    if entry["triton"] not in measured:
        raise ValueError(f"{where}: triton {entry['triton']} is not in measured: add it")
    return kind(**entry)


def verdict(compilation: Compilation, known: Iterable[Known]) -> tuple[list[str], Resources | None]:
    """Compile; what passes a limit and is not known, in words, and what the kernel takes."""
    entries = [entry for entry in known if entry.covers(compilation)]
    try:
        taken = compilation.run()
    except Exception as error:
        if any(entry.spilled is None for entry in entries):
            return [], None
        said = " ".join(str(error).split())[:300]
        return [f"does not compile: {type(error).__name__}: {said}"], None
    return taken.excesses(max((entry.spilled or 0 for entry in entries), default=0)), taken


def suggestion(compilation: Compilation, taken: Resources | None, triton: str) -> str:
    """The entry that would allow what was found; its conditions may be fewer, its reason is due."""
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
    covered = [one for one in compilations if entry.covers(one)]
    if not covered:
        return f"{entry}: no provider launches this any more: remove it"
    taken = [verdict(one, [entry])[1] for one in covered]
    if entry.spilled is None:
        return None if None in taken else f"{entry}: it compiles now: remove the entry"
    worst = max(one.spilled if one else 0 for one in taken)
    if worst < entry.spilled:
        return f"{entry}: spills {worst} bytes now, not {entry.spilled}: lower it or remove it"
    return None
