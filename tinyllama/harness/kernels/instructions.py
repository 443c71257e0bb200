"""The kinds and widths of a kernel's instructions, read from the assembly that it compiles to.

Sets of kinds and the widest access are what can be read. Counts cannot: a loop's body stands in
the text once, peeled or unrolled, as the compiler likes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

TILE = 1 << 16  # the width of a copy of a whole tile (NVIDIA's TMA): wider than any of a thread


@dataclass(frozen=True)
class Instructions:
    """loads, stores: the most bytes that a thread moves from or to global memory in one access; 0
    where it makes none, as where a wave reads by scalar loads. products: matrix instructions, as
    family and operands ("wgmma bf16"); none where products are sums of scalar ones. atomics: those
    on global memory."""

    loads: int
    stores: int
    products: tuple[str, ...] = ()
    atomics: tuple[str, ...] = ()

    @classmethod
    def of(cls, asm: Mapping[str, Any]) -> Instructions:
        """Those of a compiled kernel, from what triton keeps of its stages."""
        return of_ptx(asm["ptx"]) if "ptx" in asm else of_amdgcn(asm["amdgcn"])

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Instructions:
        """What `to_json` gave."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def worse(self, before: Instructions) -> list[str]:
        """What another revision's kernel had and this one lost, in words; a gain is no matter."""
        losses = [
            f"its widest {name[:-1]} is {width(now)}, before {width(then)}"
            for name in ("loads", "stores")
            if (now := getattr(self, name)) < (then := getattr(before, name))
        ]
        if lost := set(before.products) - set(self.products):
            losses.append(f"its products are {names(self.products)}, before {names(sorted(lost))}")
        if new := set(self.atomics) - set(before.atomics):
            losses.append(f"it has atomics that were not there: {names(sorted(new))}")
        return losses

    def __str__(self) -> str:
        return (
            f"loads {width(self.loads)}, stores {width(self.stores)}, products "
            f"{names(self.products)}, atomics {names(self.atomics)}"
        )


def width(size: int) -> str:
    """The bytes of an access, as shown."""
    return {0: "none", TILE: "a tile"}.get(size, f"{size} B")


def names(kinds: Iterable[str]) -> str:
    return ", ".join(kinds) or "none"


# -- NVIDIA -----------------------------------------------------------------------------------

# Parts of a name between dots: ld.global.L1::evict_last.v4.b32, ld.relaxed.gpu.global.b64.
ACCESS = re.compile(r"\b(ld|st)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z]+(\d+)\s")
COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")
BULK = re.compile(r"\bcp\.(reduce\.)?async\.bulk\.(?!commit|wait|prefetch)(\S+)")
WARP = re.compile(r"\b(wgmma|mma)\.\S*?\bm\d+n\d+k\d+\.(\S+)")
FIFTH = re.compile(r"\btcgen05\.mma\S*?\.kind::(\w+)")
ATOMIC = re.compile(r"\b(?:atom|red)\.(\S*global\S*)")
OPERATION = re.compile(r"\.(add|and|or|xor|cas|exch|min|max|inc|dec)\.(?:\S+\.)?(\w+)$")


def of_ptx(text: str) -> Instructions:
    """Those of NVIDIA's PTX."""
    widths, products, atomics = {"ld": {0}, "st": {0}}, set(), set()
    for kind, count, bits in ACCESS.findall(text):
        widths[kind].add(int(count or 1) * int(bits) // 8)
    widths["ld"].update(int(size, 0) for size in COPY.findall(text))
    for reduces, rest in BULK.findall(text):
        widths["st" if rest.find("global") < rest.find("shared") else "ld"].add(TILE)
        if reduces:
            atomics.add("bulk")
    for family, rest in WARP.findall(text):
        _, left, right = [part for part in rest.split(".") if part not in ("row", "col")][:3]
        products.add(_product(family, left, right))
    products.update(f"tcgen05 {kind}" for kind in FIFTH.findall(text))
    for rest in ATOMIC.findall(text):
        operation = OPERATION.search(rest)
        atomics.add(" ".join(operation.groups()) if operation else rest)
    return _instructions(widths["ld"], widths["st"], products, atomics)


# -- AMD --------------------------------------------------------------------------------------

# A spill is no access to what the kernel was given; where it goes to a buffer, a comment says so.
LINE = re.compile(
    r"^\s+(?:global|flat|buffer)_(load|store|atomic)_(\w+)\b(?!.*Folded)", re.MULTILINE
)
UNIT = re.compile(r"(?:^|_)(?:(dword)(?:x(\d))?|[su]?(byte|short)|[biu](\d+))(?:_|$)")
MATRIX = re.compile(
    r"^\s+v_(mfma(?:_scale)?|smfmac|wmma)_[a-z]+\d+_\d+x\d+x\d+(?:_\d+b)?_?([a-z]\w*)", re.MULTILINE
)
BYTES = {"dword": 4, "short": 2, "byte": 1}


def of_amdgcn(text: str) -> Instructions:
    """Those of AMD's assembly."""
    widths, atomics = {"load": {0}, "store": {0}}, set()
    for kind, name in LINE.findall(text):
        if kind == "atomic":
            atomics.add(name)
        else:
            widths[kind].add(_bytes(name))
    products = {
        _product(family, *kinds.removesuffix("_1k").split("_")[:2])
        for family, kinds in MATRIX.findall(text)
    }
    return _instructions(widths["load"], widths["store"], products, atomics)


def _bytes(name: str) -> int:
    unit = UNIT.search(name)
    if unit is None:
        raise RuntimeError(f"the width of an access {name!r} is unknown: add it to {__name__}")
    dword, count, small, bits = unit.groups()
    return int(bits) // 8 if bits else BYTES[dword or small] * int(count or 1)


def _product(family: str, left: str, right: str | None = None) -> str:
    return f"{family} {left}" if right in (None, left) else f"{family} {left} {right}"


def _instructions(
    loads: set[int], stores: set[int], products: set[str], atomics: set[str]
) -> Instructions:
    return Instructions(max(loads), max(stores), tuple(sorted(products)), tuple(sorted(atomics)))
