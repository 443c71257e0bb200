"""What a call launched, by the events of a profiler."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tinyllama.harness.measure import launches as counting
from tinyllama.harness.measure.launches import launches


def test_on_a_gpu_what_it_did_is_counted_and_waits_in_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the events of a profiler that is not there: the call's range is from 10 to 20 us."""
    ran = "launches.call"
    host, there = DeviceType.CPU, DeviceType.CUDA
    wait = "cudaStreamSynchronize"
    told = [
        (there, ran, 12, 40, False),  # on the device it appears, too, from its first kernel
        (host, "aten::mm", 0, 30, False),
        (host, ran, 10, 20, True),
        (host, "an own range", 11, 19, True),
        (there, "an own range", 11, 90, True),
        *((host, wait, start, start + 1, False) for start in (9, 10, 11, 20, 21)),
        (host, "cudaEventSynchronize2", 12, 13, False),
        (there, "nvjet_hsh", 12, 15, False),
        (there, "nvjet_hsh", 14, 18, False),
        (there, "vectorized_elementwise_kernel", 30, 32, False),
        (there, "memcpy32_post", 50, 50.5, False),
        (there, "Memset (Device)", 60, 60.5, False),
        (there, "Memcpy DtoH (Device -> Pageable)", 40, 41, False),
        (host, "hipDeviceSynchronize", 12, 13, False),
    ]
    events = [
        SimpleNamespace(
            device_type=device,
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            is_user_annotation=own,
        )
        for device, name, start, end, own in told
    ]
    seen: list[Any] = []

    @contextlib.contextmanager
    def profiled(activities: Any, acc_events: bool) -> Iterator[Any]:
        seen.append((activities, acc_events))
        yield SimpleNamespace(events=lambda: events)
        seen.append("the profiler ends")

    monkeypatch.setattr(counting, "profile", profiled)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(str(device)))
    found = launches(lambda: seen.append("call"), torch.device("cuda", 1))
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert seen == ["cuda:1", (both, True), "call", "cuda:1", "the profiler ends"]
    assert found.counts == {"kernels": 3, "copies": 3, "host_syncs": 3 + 1 + 1}
    assert found.busy_seconds == pytest.approx((6 + 2 + 1 + 0.5 + 0.5) * 1e-6)
    kinds = {"products": 7e-6, "elementwise": 2e-6, "copies": 2e-6}
    assert found.time_by == {name: pytest.approx(total) for name, total in kinds.items()}
    count, seconds = found.by_name["nvjet_hsh"]
    assert count == 2
    assert seconds == pytest.approx(7e-6)
    assert set(found.by_name) == {name for device, name, *_, own in told[9:] if device is there}


def test_on_a_cpu_operators_are_timed_without_what_they_call() -> None:
    events: Any = [
        SimpleNamespace(name=name, self_cpu_time_total=microseconds)
        for name, microseconds in [("aten::mm", 5.0), ("aten::exp", 3.0), ("aten::mm", 1.0)]
    ]
    found = counting._of_operators(events)
    assert found.counts == {}
    assert found.busy_seconds == pytest.approx(9e-6)
    kinds = {"products": 6e-6, "elementwise": 3e-6}
    assert found.time_by == {name: pytest.approx(total) for name, total in kinds.items()}
    count, seconds = found.by_name["aten::mm"]
    assert count == 2
    assert seconds == pytest.approx(6e-6)


@pytest.mark.parametrize(
    ("name", "product", "kind"),
    [
        ("own_kernel", True, "products"),
        ("own_kernel", False, "elementwise"),
        ("own_kernel", None, "other"),
        ("rms_norm_kernel", True, "products"),
        ("rms_norm_kernel", None, "elementwise"),
        ("attention_kernel", True, "attention"),
        ("attention_kernel", False, "attention"),
    ],
)
def test_an_own_kernel_is_a_product_if_it_multiplies_outside_of_attention(
    name: str, product: bool | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "multiplies", {name: product}.__getitem__)
    assert counting.kind_of(name) == kind
