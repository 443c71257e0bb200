"""``--ops FILE`` of a file that cannot be used: one line with its place, and no test runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from correctness_tests import conftest
from correctness_tests.support.commands import ROOT, python


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = = 2\n", ":2: SyntaxError: invalid syntax"),
        ("def name():\n    return nobody\n\n\nname()\n", ":2: NameError: name 'nobody' is not"),
        ("import tinyllama_not_there\n", ":1: ModuleNotFoundError: No module named"),
        ("\n\nint('x')\n", ":3: ValueError: invalid literal for int()"),
        ("import json\n\njson.loads('{')\n", ":3: JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit(0)\n", ":2: SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    config: Any = SimpleNamespace(option=SimpleNamespace(ops=[str(path)]))
    with pytest.raises(pytest.UsageError) as caught:
        conftest.pytest_configure(config)
    assert str(caught.value).startswith(f"--ops {path}{message}")


def test_a_run_with_such_a_file_ends_before_any_test(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("from tinyllama.harness import Op\nOp('Name', inputs={}, outputs={}, cases=[])")
    found = python("-m", "pytest", "-q", str(ROOT / "correctness_tests"), "--ops", str(path))
    assert found.returncode == pytest.ExitCode.USAGE_ERROR, found.stdout + found.stderr
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith(f"ERROR: --ops {path}: op 'Name'")
