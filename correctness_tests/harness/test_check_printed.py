"""What ``tinyllama check`` prints: progress while it works, and a fault that several checks see
once."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tinyllama.cli import main

RAISES = """
from tinyllama.ops.silu_mul import silu_mul

@silu_mul.provider("raises", dtypes=silu_mul.dtypes[:1])
def raises(gate, up):
    raise ArithmeticError("no result today")
"""


@pytest.mark.usefixtures("forked")
def test_progress_is_shown_and_one_crash_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raises.py"
    path.write_text(RAISES)
    only = "outputs,scaled upstream,determinism"
    assert main(["check", str(path), "--only", only, "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "silu_mul-raises: trying outputs",
        "silu_mul-raises: outputs crashed",
        "silu_mul-raises: trying scaled upstream",
        "silu_mul-raises: scaled upstream crashed",
        "silu_mul-raises: trying determinism",
        "silu_mul-raises: determinism crashed",
    ]
    assert out.count("no result today") == 1
    assert out.count("as outputs") == 2
