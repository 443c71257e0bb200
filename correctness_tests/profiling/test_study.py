"""`profile study`: a view on recorded sweeps."""

from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import printed, refused
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import Quartiles, SweepEntry

CPU = torch.device("cpu")


def sweep(tier: str, batch: int, length: int, seconds: float | None, **more: object) -> SweepEntry:
    return SweepEntry(
        name=f"sweep/{tier}/B{batch}T{length}",
        workload="tiny",
        precision="fp32",
        contender=tier,
        role="tier",
        batch_size=batch,
        seq_len=length,
        axis="seq_len",
        seconds=seconds,
        seconds_quartiles=None if seconds is None else Quartiles(seconds, seconds),
        samples_per_second=None if seconds is None else batch / seconds,
        **more,  # type: ignore[arg-type]
    )


def test_the_study_is_a_view_on_the_newest_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for date, factor in (("2030-01-01T00:00:00Z", 9.0), ("2030-01-02T00:00:00Z", 1.0)):
        monkeypatch.setattr(results, "now", lambda date=date: date)
        record = results.new_record(CPU, "sweep-tiny-fp32")
        record.entries = [
            sweep("v1", 4, 128, 0.02 * factor, peak_bytes=2**21),
            sweep("v2", 4, 128, 0.005 * factor, peak_bytes=2**20),
            sweep("v3", 4, 128, None, cannot="no GPU"),
        ]
        record.complete = True
        results.save(record, tmp_path)
    lines = printed("profile", "study", "--results-dir", tmp_path).splitlines()
    rows = [line.split() for line in lines]
    assert ["4", "x", "128", "v1", "20", "200", "1.00x", "2"] in rows
    assert ["4", "x", "128", "v2", "5", "800", "4.00x", "1"] in rows
    assert ["4", "x", "128", "v3", "-", "-", "-", "-"] in rows
    assert "v3: no GPU" in lines
    assert sum(line.startswith("sweep-tiny-fp32: ") for line in lines) == 1


@pytest.mark.parametrize("there", [True, False])
def test_without_a_sweep_it_says_what_measures_one(there: bool, tmp_path: Path) -> None:
    folder = tmp_path if there else tmp_path / "none"
    said = refused("profile", "study", "--results-dir", folder)
    assert "no sweep is recorded in" in said
    command = printed("profile", "study", "--print-command").strip()
    assert command.startswith("pytest perf_tests --record --groups sweep-")
    assert command in said
