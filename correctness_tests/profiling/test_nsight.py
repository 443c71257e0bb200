"""Counters of Nsight Compute: the command that asks for them, and what is read of its file."""

import sys
from pathlib import Path

import pytest

from correctness_tests.support import nsight_files
from correctness_tests.support.nsight_files import HEAD, WARPS
from tinyllama.profiling import nsight, running, shown
from tinyllama.profiling.command_lines import EXTERNAL, METRICS, NSIGHT
from tinyllama.profiling.kernels import ProfileError


def test_the_command_is_taken_and_its_file_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binaries = nsight_files.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    folder = running.new_folder(tmp_path / "profiles", "counters")
    for line in EXTERNAL["counters", "ncu"].lines(folder, (sys.executable, "-c", "pass")):
        running.run(line, folder, 60)
    shown.show("counters", "ncu", folder, 20)
    printed = capsys.readouterr().out
    assert f"{WARPS}   " in printed
    for cell in ("rms_norm_forward", "8192 byte", "75 %"):
        assert cell in printed


def test_times_and_sums_are_over_launches_and_shares_are_means(tmp_path: Path) -> None:
    path = nsight_files.counters(tmp_path / NSIGHT, list(METRICS))
    for found in (shown.read(path), shown.read(tmp_path)):
        assert {one.name: (one.calls, round(one.seconds * 1e9)) for one in found.totals} == {
            nsight_files.LAUNCHES[0][0]: (1, 3000),
            "rms_norm_forward": (2, 3000),
        }
        norm = {one.counter: one for one in found.counters if one.kernel == "rms_norm_forward"}
        assert (norm["dram__bytes.sum"].value, norm["dram__bytes.sum"].unit) == (8192, "byte")
        assert (norm[WARPS].value, norm[WARPS].unit) == (75, "%")


ROW = '"0","7","gemm","gpu__time_duration.sum"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==PROF== Connected\n", "has no counter of Nsight Compute: profile again"),
        ("==PROF== a\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        (f'{HEAD}\n{ROW},"nsecond","n/a"\n', r"duration.sum of gemm is 'n/a', no number"),
        (f'{HEAD}\n{ROW},"nsecond","inf"\n', "no number"),
        (f'{HEAD}\n{ROW},"nsecond"\n', "is None, no number"),
        (f'{HEAD}\n{ROW},"nsecond","12', "is truncated"),
        (f'{HEAD}\n{ROW},"cycle","12"\n', "is in 'cycle'"),
        ('"ID","Kernel Name"\n"0","gemm"\n', "has no column 'Metric Name'"),
    ],
)
def test_what_holds_no_counters_is_one_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / NSIGHT
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as raised:
        nsight.read(path)
    assert NSIGHT in str(raised.value)
