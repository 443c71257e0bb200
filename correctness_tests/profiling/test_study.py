"""`profile study`: a view on recorded sweeps."""

from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import printed, refused
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import Quartiles, SweepEntry


def sweep(tier: str, seconds: float | None, **more: object) -> SweepEntry:
    return SweepEntry(
        name=f"sweep/{tier}/B4T128",
        workload="tiny",
        precision="fp32",
        contender=tier,
        role="tier",
        batch_size=4,
        seq_len=128,
        axis="seq_len",
        seconds=seconds,
        seconds_quartiles=None if seconds is None else Quartiles(seconds, seconds),
        samples_per_second=None if seconds is None else 4 / seconds,
        **more,  # type: ignore[arg-type]
    )


def test_study_shows_newest_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for date, factor in (("2030-01-01T00:00:00Z", 9.0), ("2030-01-02T00:00:00Z", 1.0)):
        monkeypatch.setattr(results, "now", lambda date=date: date)
        record = results.new_record(torch.device("cpu"), "sweep-tiny-fp32")
        record.entries = [
            sweep("v1", 0.02 * factor, peak_bytes=2**21),
            sweep("v2", 0.005 * factor, peak_bytes=2**20),
            sweep("v3", None, cannot="no GPU"),
        ]
        record.complete = True
        results.save(record, tmp_path)
    lines = printed("profile", "study", "--results-dir", tmp_path).splitlines()
    rows = [line.split() for line in lines]
    assert ["4", "x", "128", "v1", "20", "200", "1.00x", "2"] in rows
    assert ["4", "x", "128", "v2", "5", "800", "4.00x", "1"] in rows
    assert "v3: no GPU" in lines


def test_without_sweep_study_says_what_measures_one(tmp_path: Path) -> None:
    message = refused("profile", "study", "--results-dir", tmp_path)
    assert printed("profile", "study", "--print-command").strip() in message
