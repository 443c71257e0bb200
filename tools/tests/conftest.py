"""What the tests of the tools share with those of the harness."""

from correctness_tests.conftest import gpu, pytest_configure  # noqa: F401 (fixtures and hooks)
