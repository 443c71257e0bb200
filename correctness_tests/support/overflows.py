"""A fixture: an interpreted kernel ends where an integer of 32 bits overflows."""

from dataclasses import replace

import pytest


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer of 32 bits that overflows in a kernel ends it."""
    from tinyllama.harness.kernels.interpreter import stock  # which turns this check off

    builder = stock.interpreter_builder
    options = replace(builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(builder, "options", options)
