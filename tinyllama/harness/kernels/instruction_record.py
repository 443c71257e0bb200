"""The instructions that kernels are recorded to have, by triton's minor version and chip.

A kernel is named with the types of its floating-point tensors and the precision of its products
("rope.rotate_kernel, bf16 fp32"), and stands for all its compilations with those: the narrowest of
their widest accesses, every kind of product (NONE beside others where one has none), every atomic.

Each op keeps the record of its own kernels, ``instructions.toml`` in its folder. An entry says
what it was made of (`made_of`): where this is the same, the compiler would give the same.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from tinyllama.harness.kernels.instructions import Instructions
from tinyllama.harness.kernels.limits import Known
from tinyllama.harness.kernels.resources import CHIPS, Compilation
from tinyllama.harness.machine.parsed import toml_of

NONE = "none"
FLOATING = re.compile(r"\*(?:fp|bf)\d+\w*")
Key = tuple[str, str]  # chip, kernel with its types
Record = dict[str, dict[Key, Instructions]]  # by triton's minor version


def key_of(compilation: Compilation) -> Key:
    """What a compilation is counted to."""
    traits = compilation.traits
    types = {t[1:] for t in traits.values() if isinstance(t, str) and FLOATING.fullmatch(t)}
    precision = traits.get("PRECISION", "ieee")
    named = sorted(types) + ([] if precision == "ieee" else [precision])
    return compilation.chip.name, f"{compilation.kernel}, {' '.join(named)}"


def grouped(compilations: Iterable[Compilation]) -> dict[Key, list[Compilation]]:
    found: dict[Key, list[Compilation]] = {}
    for one in compilations:
        found.setdefault(key_of(one), []).append(one)
    return found


def together(found: Iterable[Instructions]) -> Instructions:
    """One for several compilations of a kernel: what all of them have at least."""
    every = list(found)
    products = {kind for one in every for kind in one.products or (NONE,)}
    return Instructions(
        loads=min(one.loads for one in every),
        stores=min(one.stores for one in every),
        products=() if products == {NONE} else tuple(sorted(products)),
        atomics=tuple(sorted({kind for one in every for kind in one.atomics})),
    )


def made_of(
    compilations: Iterable[Compilation],
    known: Iterable[Known],
    digest: Callable[[Compilation], str] = attrgetter("digest"),
) -> str:
    """A digest of all that decides whether these compilations keep within their limits and have the
    recorded instructions. known: the limits that are listed. digest: of a compilation."""
    each = list(compilations)
    entries = {repr(entry) for entry in known if any(map(entry.covers, each))}
    whole = sorted(set(map(digest, each))) + sorted(entries)
    return hashlib.sha256(" ".join(whole).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Difference:
    """A kernel whose instructions are not those recorded."""

    key: Key
    triton: str
    recorded: Instructions
    found: Instructions

    def __str__(self) -> str:
        chip, kernel = self.key
        lost = self.found.worse(self.recorded)
        return "\n".join(
            (
                f"{kernel} on {chip}, triton {self.triton}: "
                + ("; ".join(lost) or "other than recorded"),
                f"  recorded: {self.recorded}",
                f"  found:    {self.found}",
            )
        )


# -- the file ---------------------------------------------------------------------------------

FILE = "instructions.toml"
HEADER = """\
# Written by `python -m tools.record_instructions`; loads and stores are the bytes of the widest
# access of a thread. `tinyllama.harness.kernels.instruction_record` explains the rest.
"""


def load_all(folders: Mapping[str, Path]) -> Record:
    """The records of ops by name, from their folders, as one."""
    whole: Record = {}
    for op, folder in folders.items():
        if (folder / FILE).is_file():
            for triton, kernels in load(folder / FILE, op).items():
                whole.setdefault(triton, {}).update(kernels)
    return whole


def load(path: Path, op: str) -> Record:
    """The record of an op's kernels; ValueError names what is wrong in the file."""
    try:
        content = toml_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return {
        triton: {
            (chip, f"{op}.{kernel}"): _entry(
                values, f"{path}, triton {triton}, {chip}, {kernel}", chip
            )
            for chip, kernels in chips.items()
            for kernel, values in kernels.items()
        }
        for triton, chips in content.items()
    }


def _entry(values: Mapping[str, Any], where: str, chip: str) -> Instructions:
    if chip not in CHIPS:
        raise ValueError(f"{where}: no such chip: use one of {', '.join(CHIPS)}")
    unknown = set(values) - {field.name for field in fields(Instructions)}
    missing = {"loads", "stores"} - set(values)
    if unknown or missing:
        raise ValueError(f"{where}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    return Instructions.from_json(values)


def text_of(record: Record, op: str) -> str:
    """The content of a file that `load` reads as this record of an op's kernels."""
    lines = [HEADER]
    for triton, kernels in sorted(record.items(), key=lambda item: _version(item[0])):
        for chip in sorted({chip for chip, _ in kernels}):
            lines.append(f'["{triton}".{chip}]')
            lines += [
                f'"{name.removeprefix(f"{op}.")}" = {_line(values)}'
                for (where, name), values in sorted(kernels.items())
                if where == chip
            ]
            lines.append("")
    return "\n".join(lines)


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def _line(values: Instructions) -> str:
    pairs = [f"loads = {values.loads}", f"stores = {values.stores}"]
    for name in ("products", "atomics"):
        if kinds := getattr(values, name):
            pairs.append(f"{name} = {json.dumps(list(kinds))}")
    if values.made_of:
        pairs.append(f'made_of = "{values.made_of}"')
    return f"{{ {', '.join(pairs)} }}"
