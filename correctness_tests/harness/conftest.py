"""What all tests of the harness share."""

import pytest

from tinyllama.harness.correct.checks import last_entries


@pytest.fixture(autouse=True)
def few_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 million elements take seconds; test_many_elements.py has them."""
    if not request.module.__name__.endswith("test_chosen_numbers"):
        monkeypatch.setattr(last_entries, "MANY", 2**13)
