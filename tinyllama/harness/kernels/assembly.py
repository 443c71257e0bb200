"""What a compiled kernel takes of a chip, read from the compiler's output: registers, spills,
shared memory, the widest access of a thread to global memory, and its matrix instructions.

Counts of instructions cannot be read: a loop's body stands in the text once, peeled or unrolled, as
the compiler likes.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TILE = 1 << 16  # the width of a copy of a whole tile (NVIDIA's TMA): wider than any of a thread


def taken(asm: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `tinyllama.harness.kernels.resources.Resources`, from what triton keeps of a
    kernel's stages."""
    if "cubin" in asm:
        return {**_of_cubin(asm["cubin"]), **_of_ptx(asm["ptx"])}
    return _of_amdgcn(asm["amdgcn"])


def _access(loads: set[int], stores: set[int], products: set[str]) -> dict[str, Any]:
    return {
        "loads": max(loads, default=0),
        "stores": max(stores, default=0),
        "products": tuple(sorted(products)),
    }


def _product(family: str, left: str, right: str | None = None) -> str:
    return f"{family} {left}" if right in (None, left) else f"{family} {left} {right}"


# -- NVIDIA -----------------------------------------------------------------------------------

# Parts of a name between dots: ld.global.L1::evict_last.v4.b32, ld.relaxed.gpu.global.b64.
ACCESS = re.compile(r"\b(ld|st)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z]+(\d+)\s")
COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")
BULK = re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.(?!commit|wait|prefetch)(\S+)")
WARP = re.compile(r"\b(wgmma|mma)\.\S*?\bm\d+n\d+k\d+\.(\S+)")
FIFTH = re.compile(r"\btcgen05\.mma\S*?\.kind::(\w+)")


def nvidia_tools() -> Path:
    import triton.backends.nvidia as nvidia

    return Path(nvidia.__path__[0]) / "bin"


def _of_cubin(binary: bytes) -> dict[str, int]:
    """A thread's stack and local memory hold what was spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [nvidia_tools() / "cuobjdump", "-res-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    # Its SHARED counts a kilobyte that sm_90 and later reserve, so triton's figure is taken.
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": 0}


def _of_ptx(text: str) -> dict[str, Any]:
    widths, products = {"ld": set[int](), "st": set[int]()}, set[str]()
    for kind, count, bits in ACCESS.findall(text):
        widths[kind].add(int(count or 1) * int(bits) // 8)
    widths["ld"].update(int(size, 0) for size in COPY.findall(text))
    for rest in BULK.findall(text):
        widths["st" if rest.find("global") < rest.find("shared") else "ld"].add(TILE)
    for family, rest in WARP.findall(text):
        _, left, right = [part for part in rest.split(".") if part not in ("row", "col")][:3]
        products.add(_product(family, left, right))
    products.update(f"tcgen05 {kind}" for kind in FIFTH.findall(text))
    return _access(widths["ld"], widths["st"], products)


# -- AMD --------------------------------------------------------------------------------------

# A spill is no access to what the kernel was given; where it goes to a buffer, a comment says so.
LINE = re.compile(r"^\s+(?:global|flat|buffer)_(load|store)_(\w+)\b(?!.*Folded)", re.MULTILINE)
UNIT = re.compile(r"(?:^|_)(?:(dword)(?:x(\d))?|[su]?(byte|short)|[biu](\d+))(?:_|$)")
MATRIX = re.compile(
    r"^\s+v_(mfma(?:_scale)?|smfmac|wmma)_[a-z]+\d+_\d+x\d+x\d+(?:_\d+b)?_?([a-z]\w*)", re.MULTILINE
)
BYTES = {"dword": 4, "short": 2, "byte": 1}


def _of_amdgcn(text: str) -> dict[str, Any]:
    """The registers are what the code object's metadata says."""

    def number(name: str) -> int:
        match = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
        if match is None:
            raise RuntimeError(f"the compiler's output has no .{name}")
        return int(match[1])

    widths = {"load": set[int](), "store": set[int]()}
    for kind, name in LINE.findall(text):
        widths[kind].add(_bytes(name))
    products = {
        _product(family, *kinds.removesuffix("_1k").split("_")[:2])
        for family, kinds in MATRIX.findall(text)
    }
    return {
        "registers": number("vgpr_count"),
        # Scratch holds what was spilled (4 bytes a register) and arrays that are not in registers.
        "spilled": max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count")),
        "shared": number("group_segment_fixed_size"),
        **_access(widths["load"], widths["store"], products),
    }


def _bytes(name: str) -> int:
    unit = UNIT.search(name)
    if unit is None:
        raise RuntimeError(f"the width of an access {name!r} is unknown: add it to {__name__}")
    dword, count, small, bits = unit.groups()
    return int(bits) // 8 if bits else BYTES[dword or small] * int(count or 1)
