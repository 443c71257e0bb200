"""How large a cache is taken to be, and of what the ceilings of a device are rates."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.measure import cache, ceilings
from tinyllama.harness.measure.cache import last_level_bytes
from tinyllama.harness.measure.ceilings import copy_rate, product_rate

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


@pytest.mark.parametrize(
    ("rate", "device", "rounds", "expected"),
    [
        (copy_rate, "cpu", 10, 2 * 2**26),
        (copy_rate, "meta", 10, 2 * 2**30),
        (partial(product_rate, "bf16"), "cpu", 8, 2 * 1024**3),
        (partial(product_rate, "fp32"), "meta", 8, 2 * 8192**3),
    ],
)
def test_a_rate_is_of_so_many_bytes_or_operations_in_the_least_time(
    rate: Any, device: str, rounds: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def least(call: Any, *given: Any) -> float:
        if device == "meta":
            call()
        asked.append(given)
        return 0.5

    monkeypatch.setattr(ceilings, "least_seconds", least)
    monkeypatch.setattr(torch, "randint", lambda low, high, shape, **on: torch.empty(shape, **on))
    assert rate(torch.device(device)) == expected / 0.5
    assert asked == [(torch.device(device), rounds)]


def test_a_ceiling_is_the_least_of_some_readings_after_three_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    read = iter([3.0, 1.0, 2.0, 0.5])

    def reading(call: Any) -> Any:
        assert len(calls) == 3, "warm"
        return SimpleNamespace(device=next(read))

    monkeypatch.setattr(ceilings, "Clock", lambda queue: SimpleNamespace(read=reading))
    assert ceilings.least_seconds(lambda: calls.append(1), CPU, 3) == 1.0
