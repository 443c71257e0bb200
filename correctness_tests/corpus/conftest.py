"""A variant may change a setting of the process: each test ends with the settings it began with,
and computes in one thread, since workers of xdist share the processors."""

from collections.abc import Iterator

import pytest
import torch

from tinyllama.harness.check.global_settings import restore, snapshot


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    before, threads = snapshot(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    restore(before)
