"""How large the last cache of a device is taken to be."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tinyllama.harness.measure import cache
from tinyllama.harness.measure.cache import last_level_bytes

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        (["32K", "48K", "2M", "36M"], 36 * MIB),
        (["36M", "2M"], 36 * MIB),
        (["512"], 512),
        (["1G"], 2**30),
        (["unknown", "8K"], 2**13),
        ([], 64 * MIB),
    ],
)
def test_the_last_cache_of_a_cpu_is_its_largest(
    sizes: list[str], largest: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place, size in enumerate(sizes):
        (tmp_path / f"index{place}").mkdir()
        (tmp_path / f"index{place}/size").write_text(f"{size}\n")
    monkeypatch.setattr(cache, "Path", {"/sys/devices/system/cpu/cpu0/cache": tmp_path}.get)
    assert last_level_bytes(CPU) == largest


def test_the_last_cache_of_a_gpu_may_be_one_that_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for told, largest in ((50 * MIB, 256 * MIB), (300 * MIB, 300 * MIB)):
        told_of = SimpleNamespace(L2_cache_size=told)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, of=told_of: of)
        assert last_level_bytes(torch.device("cuda")) == largest
