"""A kernel whose accesses only canaries can tell is named."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import FOLDER, Loaded, findings, variants_of
from tinyllama.harness.check.run import Outcome


@pytest.mark.parametrize("variant", ["table_of_addresses", "table_of_low_addresses"])
def test_a_kernel_that_takes_an_address_from_an_integer_is_named(
    variant: str, tmp_path: Path
) -> None:
    by_name = {each.name: each for each in variants_of(FOLDER / "chosen_elements.py")}
    with Loaded(by_name[variant], tmp_path) as candidate:
        (answer,) = findings(candidate, ("out of bounds",))
    assert answer.outcome is Outcome.PASSED
    assert "choose_kernel" in answer.message
