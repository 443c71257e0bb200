"""``--ops FILE`` of a file that cannot be imported: one line with its place, and no test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from correctness_tests.support.commands import ROOT, python


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = = 2\n", ":2: SyntaxError: invalid syntax"),
        ("def name():\n    return nobody\n\n\nname()\n", ":2: NameError: name 'nobody' is not"),
        ("import tinyllama_not_there\n", ":1: ModuleNotFoundError: No module named"),
        ("\n\nint('x')\n", ":3: ValueError: invalid literal for int()"),
        ("import sys\nsys.exit(0)\n", ":2: SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    tests = str(ROOT / "correctness_tests" / "ops" / "test_ops.py")
    found = python("-m", "pytest", "--collect-only", "-q", tests, "--ops", str(path))
    assert found.returncode == pytest.ExitCode.USAGE_ERROR, found.stdout + found.stderr
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith(f"ERROR: --ops {path}{message}")
