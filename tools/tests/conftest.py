"""What the tests of the tools share with those of the harness."""

from correctness_tests.conftest import gpu, pytest_configure  # noqa: F401 (fixtures and hooks)
from correctness_tests.support.two_trees import each_file_is_read_once  # noqa: F401
