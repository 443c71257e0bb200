"""Each wrong variant of the corpus is found, by the first check that can, and right ones pass.

`make test` leaves out the variants for which the record says that a check takes longer.
"""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.corpus.matrix import RECORD
from correctness_tests.corpus.variants import (
    Loaded,
    Variant,
    accuses,
    checks_for,
    findings,
    finds,
    variants,
)
from tinyllama.harness.check.run import CHECKS

QUICK = 1.0  # seconds
ALL = variants()
ROWS = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
LONG = {row["variant"] for row in ROWS if row["first_seconds"] > QUICK}


def marks(variant: Variant) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow(variant.slow)] if variant.slow else []
    return [*slow, *([pytest.mark.long] if str(variant) in LONG else [])]


WRONG = [
    pytest.param(variant, id=str(variant), marks=marks(variant))
    for variant in ALL
    if variant.fault and not variant.open
]

# Small, and of different kinds: rows, a norm, an index, several outputs, refused inputs.
SAMPLE = ("row_copy", "row_extremes", "scaled_copy", "soft_cap", "swapped_halves", "unit_norm")
RIGHT = [each for each in ALL if str(each) in SAMPLE]


@pytest.mark.parametrize("variant", WRONG)
def test_a_wrong_variant_is_found(variant: Variant, tmp_path: Path, device: torch.device) -> None:
    if variant.gpu and device.type == "cpu":
        pytest.skip(variant.gpu)
    seen = []
    with Loaded(variant, tmp_path, str(device) if variant.gpu else "cpu") as candidate:
        for finding in findings(candidate, checks_for(variant)):
            if finds(variant, candidate, finding):
                return
            seen.append(finding)
    said = "\n".join(f"{each.check}: {each.message}" for each in seen if each.rank)
    raise AssertionError(f"{variant} is not found; what else was said:\n{said}")


@pytest.mark.parametrize("variant", RIGHT, ids=str)
def test_a_right_variant_passes_every_check(variant: Variant, tmp_path: Path) -> None:
    with Loaded(variant, tmp_path) as candidate:
        said = [each for each in findings(candidate, CHECKS) if accuses(candidate, each)]
    assert not said


def test_the_edits_of_each_variant_fit_its_file() -> None:
    for variant in ALL:
        compile(variant.text(), str(variant.path), "exec")
