"""`tools/count_flops.py` reads what Nsight Compute prints; it and `tools/sanitize.py` say what they
lack."""

from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.nsight_files import HEAD
from tinyllama.harness.records.entries import FlopsEntry
from tinyllama.harness.records.results import Record, new_record
from tinyllama.profiling.profiles import ProfileError
from tools import count_flops, sanitize
from tools.count_flops import MATRIX, SCALAR, Count, CountError, above, parsed

PRODUCT = MATRIX[0]
FFMA, FADD, FMUL = SCALAR


def lines(*kernels: tuple[str, dict[str, Any]]) -> str:
    """As ncu prints: notices, a heading, and a line for each metric of each kernel."""
    text = ["==PROF== Connected to process 7", "something that the program prints", HEAD]
    for number, (kernel, metrics) in enumerate(kernels):
        for name in (*MATRIX, *SCALAR):
            value = metrics.get(name, 0)
            shown = f"{value:,}" if isinstance(value, int) else value
            text.append(f'"{number}","7","{kernel}","{name}","inst","{shown}"')
        text.append("==PROF== in between")
    return "\n".join(text)


def test_operations_of_each_call_are_added_up_over_its_kernels() -> None:
    text = lines(
        ("spin_kernel(long)", {FADD: 5}),
        ("gemm", {PRODUCT: 2_000_000, MATRIX[2]: 500}),
        ("spin_kernel(long)", {}),
        ("norm", {FFMA: 1_000, FADD: 10, FMUL: 1}),
        ("norm_backward", {FFMA: 1}),
        ("spin_kernel(long)", {}),
    )
    assert parsed(text) == [Count(2_000_500.0, 0.0), Count(0.0, 2_013.0), Count()]


@pytest.mark.parametrize("value", ["n/a", "", "nan"])
def test_invalid_counts_are_an_error(value: str) -> None:
    with pytest.raises(ProfileError, match=f"{PRODUCT} of gemm is '{value}'"):
        parsed(lines(("spin_kernel", {}), ("gemm", {PRODUCT: value})))
    with pytest.raises(CountError, match="gemm was counted before the first call"):
        parsed(lines(("gemm", {PRODUCT: 1})))


def test_more_than_the_last_record_is_named() -> None:
    def record(matrix: float) -> Record:
        made = new_record(torch.device("cpu"), count_flops.GROUP)
        entry = FlopsEntry(
            name="x",
            op="linear",
            case="N8",
            dtype="bf16",
            declared_flops=6.0,
            matrix_flops=matrix,
            scalar_flops=1.0,
        )
        made.entries = [entry]
        return made

    assert above(record(8.0), record(7.0)) == ["x: matrix_flops 8, recorded 7"]
    assert above(record(7.0), record(8.0)) == above(record(8.0), None) == []


@pytest.mark.parametrize(("tool", "name"), [(count_flops, "ncu"), (sanitize, "compute-sanitizer")])
def test_what_cannot_be_done_here_is_status_2_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tool: Any,
    name: str,
) -> None:
    def error(*args: str) -> str:
        assert tool.main(args) == 2
        return capsys.readouterr().err

    assert "'nope' is no op" in error("--only", "rope,nope")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"{name} is not on the PATH" in error()
    if not torch.cuda.is_available():
        (tmp_path / name).touch(mode=0o755)
        assert "no GPU" in error()


def test_the_planted_kernel_stores_beyond_its_buffer() -> None:
    """So a sanitizer that finds nothing in it sees nothing."""
    pytest.importorskip("triton")
    x, wide = torch.ones(100), torch.full((128,), 7.0)
    sanitize.stray_kernel[(1,)](x, wide, 100, FAULT="load")
    assert wide[99:101].tolist() == [1, 7]
    sanitize.stray_kernel[(1,)](x, wide, 100, FAULT="store")
    assert wide[100:102].tolist() == [0, 7]
