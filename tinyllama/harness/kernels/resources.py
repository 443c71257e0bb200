"""What a kernel takes of a chip: compiled there and then, on a machine without that chip.

    with recorded("gfx942") as launches:
        provider(...)                               # on meta tensors: nothing runs
    for launch in launches:
        print(compilation(launch, "gfx942").run())  # registers, spills, shared memory, threads

The types and specialisations of the arguments are Triton's own (its binder, asked for another
chip), so what is compiled here is what a launch there compiles.
`tinyllama.harness.check.launched` records the launches of a provider from its op's declaration.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tinyllama.harness.kernels import assembly
from tinyllama.harness.kernels.assembly import nvidia_tools
from tinyllama.harness.kernels.chips import STATED, target_of
from tinyllama.harness.kernels.kernel_names import identity
from tinyllama.harness.kernels.launch import HAS_TRITON, Launch, cdiv
from tinyllama.harness.machine.files import replace_text

THREADS = 1024  # in a program: HIP's and CUDA's limit alike
KIB = 1024
# A unit (NVIDIA's SM, AMD's CU) has four partitions, each with 512 rows of vector registers for the
# lanes of its warps or waves, allotted by eights; the programs on it share its memory.
PARTITIONS, ROWS, GRANULE = 4, 512, 8


@dataclass(frozen=True)
class Unit:
    """What the programs on one unit of a chip have together.

    warps: resident at most in a partition. shared: bytes of shared memory. programs: the most at a
    time; None where nothing but the rest limits them. reserved: bytes of the shared memory that go
    with each program, beside its own.
    """

    warps: int
    shared: int
    programs: int | None = None
    reserved: int = 0


@dataclass(frozen=True)
class Chip:
    """A compiler's target. ``wave``: threads that step together; ``shared``: the bytes of shared
    memory (LDS) that one program may use; ``unit``: None where it is not described, as that of
    gfx908, whose accumulation registers are a file of their own."""

    name: str
    wave: int
    shared: int
    unit: Unit | None


# AMD: the instruction set manuals of CDNA 1 to 4 (LDS of a CU, 8 waves a SIMD, 512 vector
# registers). NVIDIA: the CUDA programming guide's table of technical specifications (shared memory
# of a thread block and of an SM, 64 warps, 32 blocks, 65,536 registers; 1 KiB is reserved a block).
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("gfx908", 64, 64 * KIB, None),
        Chip("gfx90a", 64, 64 * KIB, Unit(8, 64 * KIB)),
        Chip("gfx942", 64, 64 * KIB, Unit(8, 64 * KIB)),
        Chip("gfx950", 64, 160 * KIB, Unit(8, 160 * KIB)),
        Chip("sm_80", 32, 163 * KIB, Unit(16, 164 * KIB, 32, KIB)),
        Chip("sm_90", 32, 227 * KIB, Unit(16, 228 * KIB, 32, KIB)),
        Chip("sm_100", 32, 227 * KIB, Unit(16, 228 * KIB, 32, KIB)),
    )
}


def chip(name: str) -> Chip:
    """The chip of this name; ValueError names the known ones."""
    if name not in CHIPS:
        raise ValueError(f"no limits are known for chip {name!r}: use one of {', '.join(CHIPS)}")
    return CHIPS[name]


@dataclass(frozen=True)
class Occupancy:
    """warps: resident in a partition (waves per SIMD); of ``most``. limit: what keeps it there."""

    warps: float
    most: int
    limit: str


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    registers: vector registers of a thread (on AMD those for accumulation included).
    spilled: bytes of a thread that live in memory because no register was left for them.
    shared: bytes of shared memory of a program.
    loads, stores: the most bytes that a thread moves from or to global memory in one access
        (`assembly.TILE` for a copy of a whole tile); 0 where it makes none, as where a wave reads
        by scalar loads.
    products: matrix instructions, as family and operands ("wgmma bf16"); none where products are
        sums of scalar ones.
    """

    kernel: str
    chip: Chip
    num_warps: int
    registers: int
    spilled: int
    shared: int
    loads: int = 0
    stores: int = 0
    products: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        return self.num_warps * self.chip.wave

    def excesses(self, spilled: int = 0) -> list[str]:
        """What passes a limit of the chip, in words; ``spilled`` bytes are allowed."""
        excesses = self.unfit()
        if self.spilled > spilled:
            excesses.append(f"{self.spilled:,} bytes a thread are spilled, allowed {spilled:,}")
        return excesses

    def unfit(self) -> list[str]:
        """Why the chip cannot launch it, in words."""
        reasons = []
        if self.shared > self.chip.shared:
            reasons.append(f"{self.shared:,} bytes of shared memory, limit {self.chip.shared:,}")
        if self.threads > THREADS:
            text = f"{self.num_warps} warps of {self.chip.wave} threads, limit {THREADS} threads"
            reasons.append(text)
        return reasons

    @property
    def occupancy(self) -> Occupancy | None:
        """How many warps a partition holds at a time; None for a chip whose unit is not
        described."""
        unit = self.chip.unit
        if unit is None:
            return None
        rows = GRANULE * cdiv(max(self.registers, 1), GRANULE)
        bounds = {
            "warps": unit.warps * PARTITIONS // self.num_warps,
            "registers": ROWS // rows * PARTITIONS // self.num_warps,
            "shared memory": unit.shared // max(1, self.shared + unit.reserved),
        }
        if unit.programs is not None:
            bounds["programs"] = unit.programs
        limit, programs = min(bounds.items(), key=lambda bound: bound[1])
        return Occupancy(programs * self.num_warps / PARTITIONS, unit.warps, limit)

    def __str__(self) -> str:
        return (
            f"{self.kernel} on {self.chip.name}: {self.registers} registers, {self.spilled} bytes "
            f"spilled, {self.shared:,} bytes shared, {self.num_warps} warps"
        )


# -- compiling --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """A launch as Triton would compile it for a chip; equal keys give equal code.

    traits: the kernel's arguments by name: values of constants, types of others (``*bf16``).
    """

    source: Any
    options: Any
    chip: Chip
    key: str
    kernel: str
    traits: Mapping[str, Any]

    def run(self) -> Resources:
        """Compile, unless this was done before, and read what the kernel takes."""
        stored = _cache() / f"{self._digest()}.json"
        if stored.is_file():
            taken = msgspec.json.decode(stored.read_bytes(), type=Resources)
        else:
            taken = self._compile()
            replace_text(stored, msgspec.json.encode(taken).decode())
        return replace(
            taken, kernel=self.kernel, chip=self.chip
        )  # of equal code, as it is called here

    def verdict(self, spilled: int = 0) -> tuple[list[str], Resources | None]:
        """What passes a limit of the chip, in words, and what the kernel takes: None where it does
        not compile. ``spilled`` bytes are allowed."""
        try:
            taken = self.run()
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            return [f"does not compile: {type(error).__name__}: {text}"], None
        return taken.excesses(spilled), taken

    def _digest(self) -> str:
        """Of what is compiled, by which compiler, with which switches, and how it is read."""
        import triton
        from triton._C.libtriton import get_cache_invalidating_env_vars

        reader = Path(assembly.__file__).read_bytes()
        switches = sorted(get_cache_invalidating_env_vars().items())
        everything = self.key, triton.__version__, _backend(self.chip).hash(), switches, reader
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    def _compile(self) -> Resources:
        import triton

        before = os.environ.get("TRITON_CACHE_DIR")
        # What the compiler leaves (a megabyte a kernel) goes to a folder that is deleted.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            try:
                compiled = triton.compile(
                    self.source, target=target_of(self.chip.name), options=self.options.__dict__
                )
            finally:
                del os.environ["TRITON_CACHE_DIR"]
                if before is not None:
                    os.environ["TRITON_CACHE_DIR"] = before
            numbers = assembly.taken(compiled.asm)
        metadata = compiled.metadata
        numbers["shared"] = max(metadata.shared, numbers["shared"])
        return Resources(self.kernel, self.chip, metadata.num_warps, **numbers)


@functools.cache
def _cache() -> Path:
    """What kernels were found to take, for the next time: some bytes each."""
    home = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(home).with_name("resources-of-kernels")


def compilation(launch: Launch, chip_name: str) -> Compilation:
    """What would be compiled for a launch on a chip: cheap, nothing is compiled yet."""
    from triton._utils import find_paths_if, get_iterable_path

    kernel, target = launch.kernel, chip(chip_name)
    backend = _backend(target)
    named_options = {**launch.options, **STATED}
    arguments, specialised, _ = _binder(kernel, target)(**launch.arguments, **named_options)
    options = backend.parse_options(dict(named_options))
    unknown = [name for name in named_options if name not in options.__dict__]
    if unknown:
        raise ValueError(f"{kernel.__name__}: triton knows no option {', '.join(unknown)}")
    types = [entry[0] for entry in specialised]
    hints = ["" if entry[0] == "constexpr" else entry[1] for entry in specialised]
    values = list(arguments.values())
    constants = find_paths_if(types, lambda _, kind: kind == "constexpr")
    hinted = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
    source = kernel.source_type(
        kernel,
        dict(zip(kernel.arg_names, types, strict=True)),
        {path: get_iterable_path(values, path) for path in constants},
        {path: backend.parse_attr(get_iterable_path(hints, path)) for path in hinted},
    )
    traits = {
        name: value if kind == "constexpr" else kind
        for name, value, kind in zip(kernel.arg_names, values, types, strict=True)
    }
    return Compilation(
        source=source,
        options=options,
        chip=target,
        key=f"{chip_name}-{source.hash()}-{options.hash()}",
        kernel=identity(kernel),
        traits={**traits, "num_warps": options.num_warps, "num_stages": options.num_stages},
    )


@functools.cache
def lacking(chip_name: str) -> str | None:
    """Why this triton cannot compile for a chip and say what it takes; None when it can."""
    target = chip(chip_name)
    if not HAS_TRITON:
        return f"triton is not installed, which compiles for {chip_name}"
    try:
        backend = _backend(target)
        # Triton before 3.5 starts AMD's ld.lld; later ones have a linker inside.
        getattr(backend, "path_to_rocm_lld", lambda: None)()
    except Exception as error:  # a build without that vendor's half, or what an old one raises
        return f"this triton does not compile for {chip_name}: {error}"
    if target_of(chip_name).backend == "cuda":
        for tool in ("ptxas", "cuobjdump"):
            if not (nvidia_tools() / tool).is_file():
                return f"this triton brings no {tool}, which is needed for {chip_name}"
    return None


@functools.cache
def _backend(target: Chip) -> Any:
    from triton.compiler import make_backend

    return make_backend(target_of(target.name))


@functools.cache
def _binder(kernel: Any, target: Chip) -> Any:
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend(target))
