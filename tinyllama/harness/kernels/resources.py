"""What a kernel takes of a chip: compiled there and then, on a machine without that chip.

    with recorded("gfx942") as launches:
        provider(...)                               # on meta tensors: nothing runs
    for launch in launches:
        print(compile_launch(launch, "gfx942"))     # registers, spills, shared memory, threads

The types and specialisations of the arguments are Triton's own (its binder, asked for another
chip), so what is compiled here is what a launch there compiles.
`tinyllama.harness.check.launched` records the launches of a provider from its op's declaration.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllama.harness.kernels import assembly, instructions
from tinyllama.harness.kernels.assembly import nvidia_tools
from tinyllama.harness.kernels.instructions import Instructions
from tinyllama.harness.kernels.launch import HAS_TRITON, STATED, Launch, identity, target_of

THREADS = 1024  # in a program: HIP's and CUDA's limit alike


@dataclass(frozen=True)
class Chip:
    """A compiler's target. ``wave``: threads that step together; ``shared``: the bytes of shared
    memory (LDS) that one program may use."""

    name: str
    wave: int
    shared: int


# LDS: the instruction set manuals of CDNA 1 to 4. NVIDIA: the CUDA programming guide's table of
# technical specifications, maximum amount of shared memory per thread block.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("gfx908", 64, 64 * 1024),
        Chip("gfx90a", 64, 64 * 1024),
        Chip("gfx942", 64, 64 * 1024),
        Chip("gfx950", 64, 160 * 1024),
        Chip("sm_80", 32, 163 * 1024),
        Chip("sm_90", 32, 227 * 1024),
        Chip("sm_100", 32, 227 * 1024),
    )
}


def chip(name: str) -> Chip:
    """The chip of this name; ValueError names the known ones."""
    if name not in CHIPS:
        raise ValueError(f"no limits are known for chip {name!r}: use one of {', '.join(CHIPS)}")
    return CHIPS[name]


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    registers: vector registers of a thread (on AMD those for accumulation included).
    spilled: bytes of a thread that live in memory because no register was left for them.
    scalar_spills: scalar registers of a wave that were spilled (AMD; to lanes of a vector one).
    shared: bytes of shared memory of a program.
    instructions: the kinds and widths of those that access memory or multiply matrices.
    """

    kernel: str
    chip: Chip
    num_warps: int
    registers: int
    spilled: int
    scalar_spills: int
    shared: int
    instructions: Instructions

    @property
    def wave(self) -> int:
        return self.chip.wave

    @property
    def threads(self) -> int:
        return self.num_warps * self.chip.wave

    def excesses(self, spilled: int = 0) -> list[str]:
        """What passes a limit of the chip, in words; ``spilled`` bytes are allowed."""
        found = self.unfit()
        if self.spilled > spilled:
            found.append(f"{self.spilled:,} bytes a thread are spilled, allowed {spilled:,}")
        return found

    def unfit(self) -> list[str]:
        """Why the chip cannot launch it, in words."""
        found = []
        if self.shared > self.chip.shared:
            found.append(f"{self.shared:,} bytes of shared memory, limit {self.chip.shared:,}")
        if self.threads > THREADS:
            found.append(f"{self.num_warps} warps of {self.wave} threads, limit {THREADS} threads")
        return found

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
        stored = _cache() / f"{self.digest}.json"
        if stored.is_file():
            numbers = json.loads(stored.read_text(encoding="utf-8"))
        else:
            numbers = self._compile()
            _write(stored, json.dumps(numbers))
        numbers["instructions"] = Instructions.from_json(numbers["instructions"])
        return Resources(kernel=self.kernel, chip=self.chip, **numbers)

    @functools.cached_property
    def digest(self) -> str:
        """Of all that decides the result: what is compiled (Triton's first representation, which
        names no line of a file), by which compiler, with which switches, and how it is read."""
        import triton
        from triton._C.libtriton import get_cache_invalidating_env_vars, ir

        backend, context = _backend(self.chip), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        given = {
            "target": target_of(self.chip.name),
            "options": self.options,
            "codegen_fns": backend.get_codegen_implementation(self.options),
            "module_map": backend.get_module_map(),
            "context": context,
        }
        wanted = inspect.signature(self.source.make_ir).parameters  # target: from triton 3.4 on
        code = self.source.make_ir(**{name: given[name] for name in wanted}).str_nodebug()
        with _surroundings():
            compiler = backend.hash()
        switches = sorted(get_cache_invalidating_env_vars().items())
        whole = code, self.options.hash(), triton.__version__, compiler, switches, _reader()
        return hashlib.sha256(repr(whole).encode()).hexdigest()

    def _compile(self) -> dict[str, Any]:
        import triton

        # What the compiler leaves (a megabyte a kernel) is not kept.
        with tempfile.TemporaryDirectory() as folder, _surroundings(folder):
            compiled = triton.compile(
                self.source, target=target_of(self.chip.name), options=self.options.__dict__
            )
            numbers: dict[str, Any] = dict(assembly.taken(compiled.asm))
            numbers["instructions"] = Instructions.of(compiled.asm).to_json()
        numbers["num_warps"] = compiled.metadata.num_warps
        numbers["shared"] = max(compiled.metadata.shared, numbers["shared"])
        return numbers


def compile_launch(launch: Launch, chip_name: str) -> Resources:
    """Compile a recorded launch for a chip, without one."""
    return compilation(launch, chip_name).run()


def compilation(launch: Launch, chip_name: str) -> Compilation:
    """What would be compiled for a launch on a chip: cheap, nothing is compiled yet."""
    from triton._utils import find_paths_if, get_iterable_path

    kernel, wanted = launch.kernel, chip(chip_name)
    backend = _backend(wanted)
    asked = {**launch.options, **STATED}
    arguments, specialised, _ = _binder(kernel, wanted)(**launch.arguments, **asked)
    with _surroundings():
        options = backend.parse_options(dict(asked))
    unknown = [name for name in asked if name not in options.__dict__]
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
        chip=wanted,
        key=f"{chip_name}-{source.hash()}-{options.hash()}",
        kernel=identity(kernel),
        traits={**traits, "num_warps": options.num_warps, "num_stages": options.num_stages},
    )


@functools.cache
def lacking(chip_name: str) -> str | None:
    """Why this triton cannot compile for a chip and say what it takes; None when it can."""
    wanted = chip(chip_name)
    if not HAS_TRITON:
        return f"triton is not installed, which compiles for {chip_name}"
    try:
        _backend(wanted)
    except RuntimeError as error:  # a build without that vendor's half
        return f"this triton does not compile for {chip_name}: {error}"
    if target_of(chip_name).backend == "cuda":
        for tool in ("ptxas", "cuobjdump"):
            if not (nvidia_tools() / tool).is_file():
                return f"this triton brings no {tool}, which is needed for {chip_name}"
    return None


@functools.cache
def _backend(wanted: Chip) -> Any:
    from triton.compiler import make_backend

    return make_backend(target_of(wanted.name))


@functools.cache
def _binder(kernel: Any, wanted: Chip) -> Any:
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend(wanted))


# -- the surroundings of a compilation --------------------------------------------------------


@contextlib.contextmanager
def _surroundings(folder: str | None = None) -> Iterator[None]:
    """A folder for what the compiler leaves (apart from Triton's own: with a stub for a linker
    its binaries are empty), and that stub where triton wants a linker and there is none."""
    changed = {"TRITON_CACHE_DIR": folder} if folder else {}
    if _lacks_linker():
        changed["TRITON_HIP_LLD_PATH"] = str(_stub())
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def _reader() -> str:
    """A digest of the code that compiles and reads."""
    parts = (Compilation, _surroundings, assembly, instructions)
    return hashlib.sha256("".join(inspect.getsource(part) for part in parts).encode()).hexdigest()


@functools.cache
def _cache() -> Path:
    """What kernels were found to take, for the next time: some bytes each."""
    home = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(home).with_name("resources-of-kernels")


def _write(path: Path, text: str) -> None:
    """A file that appears whole, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.chmod(0o700)
    part.replace(path)


@functools.cache
def _lacks_linker() -> bool:
    """Triton before 3.5 starts AMD's ld.lld; later ones have a linker inside."""
    from triton.backends.amd.compiler import HIPBackend

    if not hasattr(HIPBackend, "path_to_rocm_lld"):
        return False
    try:
        HIPBackend.path_to_rocm_lld()
    except Exception:  # what triton raises
        return True
    return False


@functools.cache
def _stub() -> Path:
    """A linker that links nothing; what is read here is written before linking."""
    path = _cache() / "no-linker"
    script = (
        '#!/bin/sh\n[ "$1" = --version ] && echo none\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'
    )
    _write(path, script)
    return path
