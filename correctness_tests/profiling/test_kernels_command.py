"""`tinyllama kernels --against` compares the kernels of two revisions."""

import json
from pathlib import Path

import pytest

from correctness_tests.support.commands import printed, refused, tinyllama

pytest.importorskip("triton")


@pytest.mark.long
def test_kernel_that_became_worse_or_vanished_is_named(tmp_path: Path) -> None:
    table, better = tmp_path / "table.json", tmp_path / "better.json"
    command = ("kernels", "--op", "transpose", "--chip", "gfx942")
    printed(*command, "--json", table)
    data = json.loads(table.read_text())
    first = data["kernels"][0]
    data["kernels"].append({**first, "kernel": "transpose.gone_kernel"})
    first["occupancy"] += 1
    better.write_text(json.dumps(data))
    assert "no kernel takes more than before" in printed(*command, "--against", table)
    done = tinyllama(*command, "--against", better)
    assert done.status == 1
    assert f"WORSE {first['kernel']} on gfx942" in done.out
    assert "MISSING transpose.gone_kernel on gfx942" in done.out
    message = refused("kernels", "--op", "rope", "--chip", "gfx942", "--against", table)
    assert "has no kernel of rope on gfx942" in message
