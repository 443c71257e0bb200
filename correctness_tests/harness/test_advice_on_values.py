"""What check.md calls advice on values and precision is of no higher rank."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import FOLDER, Loaded, variants_of
from tinyllama.harness.check.run import Rank, run


@pytest.mark.parametrize(
    ("op", "name", "check", "text"),
    [
        ("block_matrix_product", "products_in_tf32", "fresh contents", "are tf32"),
    ],
)
def test_it_is_advice(op: str, name: str, check: str, text: str, tmp_path: Path) -> None:
    variant = next(v for v in variants_of(FOLDER / f"{op}.py") if v.name == name)
    with Loaded(variant, tmp_path) as candidate:
        (finding,) = run(candidate, (check,))
    assert finding.rank is Rank.WARNING
    assert text in finding.message
