"""A digest of what a launch runs: its compiled code without debug lines.

A comment above a kernel moves its line numbers, which changes the binary and nothing that runs.
Two launches are equal when their instructions, their grids and their launch options (warps, shared
memory, clusters) are equal.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from tinyllama.harness.kernels.launch import Launched

STAGES = ("amdgcn", "ptx")  # the last text of each backend before its binary
# Where debug information stands in them: whole lines, and sections to the end of the text.
_DEBUG_LINE = re.compile(r"^\s*(\.loc\b|\.file\b|\.cfi_\w+|\$L__tmp\d+:|\.Ltmp\d+:).*$")
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\"?\.(debug_|AMDGPU\.csdata)\w*")
_SECTION = re.compile(r"^\s*\.(section|text|amdgpu_metadata|amdgcn_target)\b")
_COMMENTS = {"amdgcn": re.compile(r"\s*(//|;).*$"), "ptx": re.compile(r"\s*//.*$")}
# Launch options; names and source positions are not among them.
_OPTIONS = (
    "num_warps",
    "num_ctas",
    "shared",
    "cluster_dims",
    "launch_cooperative_grid",
    "launch_pdl",
)


def code(text: str, stage: str) -> str:
    """PTX or AMD assembly without debug lines and comments."""
    lines, inside = [], False
    for line in text.splitlines():
        if _DEBUG_SECTION.match(line):
            inside = True
        elif _SECTION.match(line):
            inside = False
        if inside or _DEBUG_LINE.match(line):
            continue
        bare = _COMMENTS[stage].sub("", line).rstrip()
        if bare:
            lines.append(bare)
    return "\n".join(lines)


def code_of(asm: Any) -> str:
    """The instructions of a compiled kernel. Raises LookupError for a backend that has no text."""
    for stage in STAGES:
        if stage in asm:
            return code(str(asm[stage]), stage)
    raise LookupError(f"no instructions in the stages {', '.join(map(str, asm))}")


def fingerprint(launches: Iterable[Launched]) -> list[str]:
    """A digest of each launch, in order."""
    return [_digest(launch) for launch in launches]


def _digest(launch: Launched) -> str:
    metadata = launch.kernel.metadata
    options = {name: getattr(metadata, name, None) for name in _OPTIONS}
    content = [code_of(launch.kernel.asm), list(launch.grid), options]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()
