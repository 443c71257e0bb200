"""How many programs of a kernel a compute unit holds at a time, from what the kernel takes.

A unit (NVIDIA's SM, AMD's CU) has four partitions, each with 512 rows of vector registers for the
lanes of its warps or waves, allotted by eights; the programs on it share its memory. Sources: the
CUDA programming guide, technical specifications by compute capability (64 warps, 32 blocks, 65,536
registers, shared memory of an SM with 1 KiB of it reserved for each block); the instruction set
manuals of CDNA 2 to 4 (8 waves a SIMD, 512 vector registers, LDS of a CU).
"""

from dataclasses import dataclass

from tinyllama.harness.kernels.launch import cdiv
from tinyllama.harness.kernels.resources import Resources

PARTITIONS = 4
ROWS, GRANULE = 512, 8  # vector registers of a partition for each lane, and how they are allotted


@dataclass(frozen=True)
class Unit:
    """warps: resident at most in a partition. programs: on the unit (None: no limit but others).
    shared: bytes for all programs together. reserved: bytes of them beside each program's own."""

    warps: int
    shared: int
    programs: int | None = None
    reserved: int = 0


UNITS = {
    "gfx90a": Unit(8, 64 * 1024),
    "gfx942": Unit(8, 64 * 1024),
    "gfx950": Unit(8, 160 * 1024),
    "sm_80": Unit(16, 164 * 1024, 32, 1024),
    "sm_90": Unit(16, 228 * 1024, 32, 1024),
    "sm_100": Unit(16, 228 * 1024, 32, 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """warps: resident in a partition (waves per SIMD); of ``most``. limit: what keeps it there."""

    warps: float
    most: int
    limit: str

    def __str__(self) -> str:
        return f"{self.warps:g} of {self.most} ({self.limit})"


def occupancy(taken: Resources) -> Occupancy | None:
    """The occupancy of a kernel; None for a chip whose units are not described here.

    gfx908 is not: its accumulation registers are a file of their own.
    """
    unit = UNITS.get(taken.chip.name)
    if unit is None:
        return None
    rows = GRANULE * cdiv(max(taken.registers, 1), GRANULE)
    by_registers = ROWS // rows * PARTITIONS // taken.num_warps
    bounds = {
        "warps": unit.warps * PARTITIONS // taken.num_warps,
        "registers": by_registers,
        "shared memory": unit.shared // max(1, taken.shared + unit.reserved),
    }
    if unit.programs is not None:
        bounds["programs"] = unit.programs
    programs = min(bounds.values())
    limit = next(name for name, bound in bounds.items() if bound == programs)
    return Occupancy(programs * taken.num_warps / PARTITIONS, unit.warps, limit)
