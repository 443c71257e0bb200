"""The commands of docs/FOREIGN.md print what it says, on the files that it shows."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from correctness_tests.support.commands import ENVIRONMENT, ROOT

pytest.importorskip("triton")
TEXT = (ROOT / "docs" / "FOREIGN.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|console)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    tuple(command.partition("\n")[::2])
    for kind, text in BLOCKS
    if kind == "console"
    for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
]


def shown(output: str) -> list[str]:
    """A check's table as the guide shows it, ``check | verdict``, and the line below it."""
    rows = re.findall(r"^│ (\S[^│]*?) +│ (\w+) ", output, re.MULTILINE)
    lines = [" | ".join(row) for row in rows]
    return lines + re.findall(r"^\S+: (?:wrong result|unsafe): .*$", output, re.MULTILINE)


def test_the_guide_is_followed(tmp_path: Path) -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    liger = importlib.util.find_spec("liger_kernel") is not None
    followed = 0
    for command, expected in COMMANDS:
        if "my_layer_norm" in command and not liger:
            continue  # in no lane but those that install peers
        argv = shlex.split(command)
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
        done = subprocess.run(
            argv, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1), done.stderr
        assert shown(done.stdout) == expected.splitlines(), done.stdout
        assert done.returncode == ("wrong result" in expected)
        followed += 1
    assert followed >= 3
