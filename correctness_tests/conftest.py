"""Ops of --ops files join those of the tree before any specification is collected."""

import pytest

from correctness_tests.timed_suite import baseline, suite  # noqa: F401 (fixtures)
from tinyllama.harness import DeclarationError, load_file
from tinyllama.ops import OPS


def pytest_configure(config: pytest.Config) -> None:
    for name in config.option.ops:
        try:
            load_file(name, OPS)
        except (DeclarationError, ValueError) as error:
            raise pytest.UsageError(f"--ops {name}: {error}") from error
