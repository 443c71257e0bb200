"""A variant may change a setting of the process: each test ends with the settings it began with,
and computes in one thread, since workers of xdist share the processors."""

from collections.abc import Iterator

import pytest
import torch

from tinyllama.harness.check.state import SETTINGS, same_setting


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    before = {name: setting.get() for name, setting in SETTINGS.items()}
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(default)
    for name, setting in SETTINGS.items():
        if not same_setting(setting.get(), before[name]):
            setting.set(before[name])
