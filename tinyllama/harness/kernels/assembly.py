"""What the compiler says that a kernel takes: registers, spills, shared memory."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def taken(asm: Any) -> dict[str, int]:
    """Fields of `tinyllama.harness.kernels.resources.Resources`, from a compiled kernel."""
    return _of_cubin(asm) if "cubin" in asm else _of_amdgcn(asm)


def _of_amdgcn(asm: Any) -> dict[str, int]:
    """What the code object's metadata says."""
    text = asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
        if match is None:
            raise RuntimeError(f"the compiler's output has no .{name}")
        return int(match[1])

    return {
        "registers": number("vgpr_count"),
        # Scratch holds what was spilled (4 bytes a register) and arrays that are not in registers.
        "spilled": max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count")),
        "scalar_spills": number("sgpr_spill_count"),
        "shared": number("group_segment_fixed_size"),
    }


def _of_cubin(asm: Any) -> dict[str, int]:
    """The same from the binary: a thread's stack and local memory hold what was spilled."""
    tool = nvidia_tools() / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "scalar_spills": 0,
        "shared": 0,  # its SHARED counts a kilobyte that sm_90 and later reserve
    }


def nvidia_tools() -> Path:
    import triton.backends.nvidia as nvidia

    return Path(nvidia.__path__[0]) / "bin"
