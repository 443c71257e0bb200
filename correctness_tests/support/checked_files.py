"""What ``tinyllama check`` finds in files that a test writes."""

import json
from pathlib import Path
from typing import Any

from tinyllama.cli import main

Found = dict[str, dict[str, dict[str, str]]]
# A provider of rope whose body follows.
ROPE = """
import ctypes, os, signal, time, torch
from tinyllama.ops.rope import rope

@rope.provider("mine", dtypes=(torch.float32,){traits})
def mine(q, k, cos, sin, interleaved):
    {body}
    return rope["eager"].call(q, k, cos, sin, interleaved)
"""


def checked(tmp_path: Path, *words: str) -> tuple[int, Found]:
    """The exit status, and the findings by provider and check."""
    out = tmp_path / "found.json"
    status = main(["check", "--device", "cpu", "--json", str(out), *words])
    findings = json.loads(out.read_text())
    return status, {
        name: {finding["check"]: finding for finding in every} for name, every in findings.items()
    }


def of_rope(tmp_path: Path, body: str, *words: str, traits: str = "") -> tuple[int, Any]:
    """The exit status, and the findings on a provider of rope by check."""
    path = tmp_path / "mine.py"
    path.write_text(ROPE.format(body=body, traits=traits))
    status, found = checked(tmp_path, str(path), *words)
    return status, found["rope-mine"]
