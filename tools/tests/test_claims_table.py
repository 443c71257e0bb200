"""The occupancy that docs/ULTRA.md shows is that of the kernels."""

import json
import statistics

import pytest

from tinyllama.harness.records.results import versions
from tools.claims_table import RECORD, STEP, least_bytes, shares


def test_the_recorded_occupancy_is_what_compiles_now() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    if versions()["triton"] != recorded["versions"]["triton"]:
        pytest.skip("another triton compiles other kernels")
    found = [*shares("v3", "gfx942")]
    assert len(found) == 10
    assert all(0 < share <= 1 for share in found)
    assert statistics.fmean(found) == pytest.approx(recorded["occupancy"]["v3"]["gfx942"])


def test_the_bytes_of_a_step_are_those_of_its_ops() -> None:
    """AdamW of 31,977,984 parameters alone moves 28 bytes for each."""
    assert set(STEP) == {"embedding", "stack", "rms_norm", "linear_cross_entropy", "adamw"}
    assert 28 * 31_977_984 < least_bytes() < 1.5 * 28 * 31_977_984
