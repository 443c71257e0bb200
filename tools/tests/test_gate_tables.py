"""Tables of documents about the gate: what it holds on a device, what it said of branches."""

import json
from pathlib import Path

import pytest

from correctness_tests.support.gate_samples import certificate, run, stored, told
from tools import gate_tables
from tools.try_gate import BRANCHES


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that git tracks; none at first."""
    files: list[Path] = []
    monkeypatch.setattr(gate_tables, "tracked", lambda pattern: files)
    return files


def test_documents_show_bars_in_short_and_figures_whole(found: list[Path], tmp_path: Path) -> None:
    assert gate_tables.bars() == gate_tables.certificate() == "No device is certified yet."
    found.append(stored(tmp_path, certificate()))
    assert "| 99% found | 1 of 2 | **missed** |" in gate_tables.bars()
    assert "one/a" not in gate_tables.bars()
    whole = gate_tables.certificate()
    assert "| 99% found | 1 of 2; not two/a (SYNTHETIC) | **missed** |" in whole
    assert "| one/a | device_seconds | 0.12% | 0.0% | 99.9% | 1.5% |" in whole
    assert "| two/a | host_seconds | 0.12% | 0.0% | 99.9% | none |" in whole
    assert "torch 9.9; commit c0ffeec0ff; 2030-01-31." in whole


def test_the_table_shows_every_branch_that_was_tried(found: list[Path], tmp_path: Path) -> None:
    assert gate_tables.tried() == "Nothing is recorded yet."
    moved = "rms_norm_forward: 9.0 us in 1 -> 9.7 us in 1"
    common = {"device": "a GPU", "versions": {"torch": "9.9"}, "branch": "slower-kernel"}
    runs = [
        {**common, **run(10, told(moved=moved)), "commit": "c0ffee", "date": "2030-01"},
        {**common, **run(11, told(outcome="SAME"), 200.0), "commit": "c0ffee", "date": "2030-02"},
    ]
    found.append(tmp_path / "tried.json")
    found[0].write_text(json.dumps(runs))
    text = gate_tables.tried()
    slow = "device_seconds of rms_norm-triton-N8-bf16/forward+backward in 1 (rms_norm_forward)"
    assert f"| 2 | 10, 11 | 10 to 200 | {slow}; **" in text
    assert "**it took 200 s, not 180**" in text
    assert BRANCHES["comments"].does not in text
    assert "a GPU; torch 9.9; commit c0ffee; 2030-02" in text


def test_the_table_of_a_validation_groups_by_what_was_added(
    found: list[Path], tmp_path: Path
) -> None:
    assert gate_tables.validation() == "Nothing is recorded yet."
    measured = {
        "a-triton-N": (0.0, [("device_seconds", 1.001, "SAME")]),
        "b-triton-N": (
            0.02,
            [("host_seconds", 1.5, "SLOWER"), ("device_seconds", 1.021, "SLOWER")],
        ),
        "c-triton-N": (
            0.02,
            [("kernels", 1.5, "SLOWER"), ("device_seconds", 1.018, "INCONCLUSIVE")],
        ),
        "d-triton-N": (0.1, [("host_seconds", 1.11, "SLOWER")]),
        "e-triton-N": (0.1, []),
    }
    content = {
        "device": "a GPU",
        "date": "2030-01-31T00:00:00Z",
        "commit": "c0ffee",
        "versions": {"torch": "9.9"},
        "slowed": {**{n: share for n, (share, _) in measured.items()}, "f-torch-N": 0.0},
        "wrong": ["c-triton-N", "e-triton-N"],
        "benchmarks": {
            name: {
                "outcome": "of all figures",
                "figures": [{"metric": m, "ratio": r, "outcome": said} for m, r, said in figures],
            }
            for name, (_, figures) in measured.items()
        },
    }
    found.append(tmp_path / "validation.json")
    found[0].write_text(json.dumps(content))
    text = gate_tables.validation()
    assert "| device_seconds | 0% | 1 | +0.1% to +0.1% | 1 SAME |" in text
    assert "| device_seconds | 2% | 2 | +1.8% to +2.1% | 1 INCONCLUSIVE, 1 SLOWER |" in text
    assert "| host_seconds | 10% | 1 | +11.0% to +11.0% | 1 SLOWER |" in text
    assert (
        "Providers: torch, triton. Not what was added: c-triton-N, e-triton-N. "
        "Not timed: e-triton-N, f-torch-N. a GPU; torch 9.9; commit c0ffee; 2030-01-31." in text
    )
