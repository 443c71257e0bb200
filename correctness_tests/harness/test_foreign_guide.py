"""The commands of docs/FOREIGN.md print what it says, on the files that it shows."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from correctness_tests.support.commands import ROOT, tinyllama

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


@pytest.mark.usefixtures("forked")
def test_the_guide_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    liger = importlib.util.find_spec("liger_kernel") is not None
    followed = 0
    for command, expected in COMMANDS:
        if "my_layer_norm" in command and not liger:
            continue  # in no lane but those that install peers
        followed += 1
        argv = shlex.split(command)
        if argv[0] == "sed":
            assert not expected
            subprocess.run(argv, check=True)
            continue
        assert argv[:3] == ["python", "-m", "tinyllama"]
        done = tinyllama(*argv[3:])
        assert done.status in (0, 1), done.err
        assert shown(done.out) == expected.splitlines(), done.out
        assert done.status == ("wrong result" in expected)
    assert followed >= 3
