"""What all tests of the harness share."""

import pytest

from tinyllama.harness.check import last_entries


@pytest.fixture(autouse=True)
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 million elements take seconds; the corpus has them."""
    monkeypatch.setattr(last_entries, "MANY", 2**13)
