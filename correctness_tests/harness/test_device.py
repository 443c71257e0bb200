"""What a device can do, of GPUs that are stood in for."""

import pytest
import torch

from tinyllama.harness.machine import device as device_module
from tinyllama.harness.machine.device import cannot, usable_device

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("hip", "version", "lacking"),
    [
        (None, (5, 2), {"cooperative", "tf32"}),
        (None, (7, 5), {"tf32"}),
        (None, (8, 0), set()),
        (None, (9, 0), set()),
        ("6.4", (9, 0), set()),
        ("6.4", (1, 0), set()),  # a version says nothing of AMD's
    ],
)
def test_what_a_gpu_lacks_follows_from_its_version(
    hip: str | None, version: tuple[int, int], lacking: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    assert {name for name in ("gpu", "cooperative", "tf32", "fp16") if cannot(name, GPU)} == lacking


@pytest.mark.parametrize("has", [True, False])
def test_a_cpu_has_bf16_and_a_gpu_says_so(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has)
    assert cannot("bf16", CPU) is None
    assert (cannot("bf16", GPU) is None) is has
    assert cannot("tf32", CPU)


def test_the_device_of_no_name_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "default_device", lambda: torch.device("cuda", 3))
    assert usable_device(None) == torch.device("cuda", 3)
    assert usable_device("cpu") == torch.device("cpu")
