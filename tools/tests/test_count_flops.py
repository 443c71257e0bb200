"""`tools/count_flops.py`: every count is read, and counters that do not count are no success."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.nsight_files import HEAD
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.records.results import folder, new_record, save
from tinyllama.ops import OPS
from tinyllama.profiling.kernels import ProfileError
from tools import count_flops, cuda_tools, sanitize
from tools.count_flops import KNOWN, MATRIX, SCALAR, Count, CountError, above, parsed

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
    text = lines(("spin_kernel", {}), ("gemm", {PRODUCT: value}))
    with pytest.raises(ProfileError, match=f"{PRODUCT} of gemm is '{value}'"):
        parsed(text)


def test_a_kernel_before_the_first_call_is_an_error() -> None:
    with pytest.raises(CountError, match="gemm was counted before the first call"):
        parsed(lines(("gemm", {PRODUCT: 1})))


# -- the command --------------------------------------------------------------------------------

RIGHT = {PRODUCT: 2 * KNOWN**3}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command on a GPU that executes so much; returns its status."""
    monkeypatch.setattr(cuda_tools.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(cuda_tools, "cannot", lambda need, device: None)

    process = subprocess.run

    def run(*args: str, known: dict[str, Any] = RIGHT, status: int = 0, **executed: int) -> int:
        def answer(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
            if "--only" not in command:
                return process(command, **options)
            names = command[command.index("--only") + 1].split(",")
            calls = [("spin_kernel", {}), ("gemm", known)]
            for name in (name for name in names if "triton" in OPS[name].providers):
                calls += [("spin_kernel", {}), (name, {PRODUCT: executed.get(name, 7)})]
            return subprocess.CompletedProcess(command, status, lines(*calls), "it broke")

        monkeypatch.setattr(count_flops.subprocess, "run", answer)
        return count_flops.main([*args, "--results-dir", str(tmp_path)])

    return run


def test_more_than_was_recorded_is_a_failure(
    counter: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert counter("--record") == 0
    assert "recorded" in capsys.readouterr().out
    assert counter() == 0
    assert counter(attention=8) == 1
    case = OPS["attention"].timed[-1]
    text = f"flops/attention-triton-{case}-bf16: matrix_flops 8, recorded 7"
    assert text in capsys.readouterr().err
    assert counter("--only", "rope", attention=8) == 0
    assert counter("--only", "attention", attention=8) == 1
    assert counter(attention=6) == 0, "less is no failure"


def test_a_record_of_some_ops_is_not_what_others_are_held_to(counter: Any) -> None:
    assert counter("--record", "--only", "attention") == 0
    assert counter(attention=8) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"known": {PRODUCT: KNOWN**3}}, f"a product of 2 x {KNOWN}^3 operations was counted as"),
        ({"known": {}}, "was counted as 0"),
        ({"status": 9}, "ncu ended with status 9: it broke"),
    ],
    ids=["halved", "nothing", "broken"],
)
def test_counters_that_do_not_count_are_no_success(
    counter: Any, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    assert counter("--record", **options) == 2
    assert message in capsys.readouterr().err


def test_a_call_that_was_not_counted_is_no_success(
    counter: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = count_flops.parsed
    monkeypatch.setattr(count_flops, "parsed", lambda text: found(text)[:-1])
    assert counter("--only", "rope,attention") == 2
    assert "1 calls were counted, not 2" in capsys.readouterr().err


def test_a_profiler_that_does_not_end_is_no_success(
    counter: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(command: Sequence[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(count_flops.subprocess, "run", never)
    assert count_flops.main([]) == 2
    assert "no end after 1800 s" in capsys.readouterr().err


@pytest.mark.parametrize(("tool", "name"), [(count_flops, "ncu"), (sanitize, "compute-sanitizer")])
def test_what_cannot_be_done_here_is_status_2_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: Any, name: str
) -> None:
    def error(*args: str) -> str:
        assert tool.main(args) == 2
        return capsys.readouterr().err

    assert "'nope' is no op" in error("--only", "rope,nope")
    monkeypatch.setattr(cuda_tools.shutil, "which", lambda name: None)
    assert f"{name} is not on the PATH" in error()
    monkeypatch.setattr(cuda_tools.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(cuda_tools, "default_device", lambda: torch.device("cpu"))
    assert "no GPU" in error()


def test_ops_without_kernels_cannot_be_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert count_flops.main(["--only", "qkv"]) == 2
    assert "none of these has a Triton" in capsys.readouterr().err


def test_where_nothing_can_be_stored_or_read_nothing_is_counted(
    counter: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(count_flops, "default_device", lambda: torch.device("cpu"))
    (tmp_path / "file").write_text("")
    assert counter() == 0
    count_flops.subprocess.run = None  # type: ignore[assignment]  # and whoever calls it fails
    assert count_flops.main(["--record", "--results-dir", str(tmp_path / "file")]) == 2
    assert "name a folder that can be written" in capsys.readouterr().err
    stale = (
        folder(tmp_path, device_name(torch.device("cpu"))) / "20300101T000000Z-c0ffee-flops.json"
    )
    stale.parent.mkdir()
    stale.write_text("{}")
    assert count_flops.main(["--results-dir", str(tmp_path)]) == 2
    assert stale.name in capsys.readouterr().err


def test_the_share_is_of_what_is_declared(tmp_path: Path) -> None:
    record = new_record(torch.device("cpu"), count_flops.GROUP)
    timed = count_flops._case("linear")
    case = OPS["linear"].timed[-1]
    declared = 6.0 * case.dims["N"] * case.dims["D"] * case.dims["F"]
    record.entries = [count_flops._entry(timed, Count(matrix=1.5 * declared, scalar=3.0))]
    ((*_, share),) = count_flops.rows(record)
    assert share == "1.500"
    save(record, tmp_path)
    assert above(record, None) == []
    assert above(record, replace(record, entries=[])) == []
