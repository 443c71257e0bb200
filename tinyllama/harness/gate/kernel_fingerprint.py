"""A digest of what a launch runs: its compiled code without debug lines.

A comment above a kernel moves its line numbers, which changes the binary and nothing that runs.
Two launches are equal when their instructions, their grids and their launch options (warps, shared
memory, clusters) are equal.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tinyllama.harness.kernels.launch import Launched

# Where debug information stands in assembly: whole lines, and sections to the end of the text.
_DEBUG_LINE = re.compile(r"^\s*(\.loc\b|\.file\b|\.cfi_\w+|\$L__tmp\d+:|\.Ltmp\d+:).*$")
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\"?\.(debug_|AMDGPU\.csdata)\w*")
_SECTION = re.compile(r"^\s*\.(section|text|amdgpu_metadata|amdgcn_target)\b")
# Of the last text of each backend before its binary.
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


def _code(asm: Mapping[str, Any]) -> str:
    """The PTX or AMD assembly of a compiled kernel, without debug lines and comments. Raises
    LookupError for a backend that has neither."""
    stage = next((stage for stage in _COMMENTS if stage in asm), None)
    if stage is None:
        raise LookupError(f"no instructions in the stages {', '.join(map(str, asm))}")
    lines, inside = [], False
    for line in str(asm[stage]).splitlines():
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


def fingerprint(launches: Iterable[Launched]) -> list[str]:
    """A digest of each launch, in order."""
    digests = []
    for launch in launches:
        options = {name: getattr(launch.kernel.metadata, name, None) for name in _OPTIONS}
        content = [_code(launch.kernel.asm), list(launch.grid), options]
        text = json.dumps(content, default=str)
        digests.append(hashlib.sha256(text.encode()).hexdigest())
    return digests
