"""What a chip's unit holds, what a device can do, and ceilings: numbers by their definitions."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.correct.layouts import LAYOUTS, TIED, UPSTREAMS, laid_out
from tinyllama.harness.kernels import gluon
from tinyllama.harness.kernels.occupancy import Occupancy, occupancy
from tinyllama.harness.machine.device import (
    cannot,
    current,
    default_device,
    device_name,
    memory_bytes,
    slug,
    synchronize,
    usable_device,
)
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.interrupts import held_interrupts, sigterm_as_interrupt
from tinyllama.harness.measure import ceilings
from tinyllama.harness.measure.overlap import Overlap, overlap_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# -- occupancy ------------------------------------------------------------------------------------


@dataclass
class Chip:
    name: str


@dataclass
class Taken:
    """Of `Resources`, what occupancy reads."""

    chip: Chip
    registers: int
    num_warps: int
    shared: int


@pytest.mark.parametrize(
    ("chip", "registers", "warps", "shared", "resident", "limit"),
    [
        # sm_90: 4 partitions of 16 warps and 512 rows; 228 KiB; 32 programs.
        ("sm_90", 32, 4, 0, 16, "warps"),
        ("sm_90", 33, 4, 0, 12, "registers"),  # 40 rows, so 12 programs a partition's four warps
        ("sm_90", 255, 8, 0, 2, "registers"),
        ("sm_90", 88, 1, 0, 5, "registers"),  # the rest of a partition is of no use to another
        ("sm_90", 0, 1, 0, 8, "programs"),  # 32 programs of one warp
        ("sm_90", 32, 8, 100 * 1024, 4, "shared memory"),  # two programs of 8 warps
        ("sm_90", 16, 4, 113 * 1024, 2, "shared memory"),
        ("sm_90", 16, 4, 113 * 1024 + 1, 1, "shared memory"),
        ("sm_100", 16, 4, 113 * 1024, 2, "shared memory"),
        ("sm_80", 16, 4, 81 * 1024, 2, "shared memory"),
        ("sm_80", 16, 4, 81 * 1024 + 1, 1, "shared memory"),
        ("sm_80", 128, 4, 1024, 4, "registers"),
        # CDNA: 8 waves a SIMD; nothing is reserved for a program.
        ("gfx942", 64, 4, 0, 8, "warps"),
        ("gfx942", 65, 4, 0, 7, "registers"),
        ("gfx942", 8, 4, 32 * 1024, 2, "shared memory"),
        ("gfx90a", 8, 4, 32 * 1024 + 1, 1, "shared memory"),
        ("gfx950", 8, 8, 40 * 1024, 8, "warps"),
        ("gfx950", 8, 8, 40 * 1024 + 1, 6, "shared memory"),
    ],
)
def test_what_a_unit_holds_is_what_its_scarcest_part_allows(
    chip: str, registers: int, warps: int, shared: int, resident: float, limit: str
) -> None:
    found = occupancy(Taken(Chip(chip), registers, warps, shared))  # type: ignore[arg-type]
    most = 8 if chip.startswith("gfx") else 16
    assert found == Occupancy(resident, most, limit)
    assert str(found) == f"{resident:g} of {most} ({limit})"


# -- what a device can do -------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch tells of a GPU that is not there."""
    told: dict[str, Any] = {"capability": (9, 0), "bf16": True, "count": 1, "current": None}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: told["capability"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: told["bf16"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: told["count"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.update(current=device))
    return told


def test_capabilities_that_a_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cannot("gpu", CPU) == "no GPU is available to torch"
    assert cannot("capture", CPU) == "device graphs need a GPU"
    assert cannot("tf32", CPU) == "tf32 is a mode of a GPU's matrix units"
    for name in ("cooperative", "bf16", "fp32", "fp16", "triton", "module torch"):
        assert cannot(name, CPU) is None
    for there in ("c++", "g++", "clang++"):
        only = {there: f"/{there}"}
        monkeypatch.setattr(shutil, "which", only.get)
        assert cannot("compile", CPU) is None
    monkeypatch.setattr(shutil, "which", {}.get)
    text = "torch.compile needs a C++ compiler (g++) on the CPU"
    assert cannot("compile", CPU) == text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cannot("module torch", CPU) == "torch is not installed"
    for name, device in (("triton", CPU), ("compile", GPU)):
        assert str(cannot(name, device)).startswith("triton is not installed (")
    for name in ("", "tf16", "bf-16"):
        with pytest.raises(ValueError, match=f"unknown capability {name!r}"):
            cannot(name, CPU)


@pytest.mark.parametrize(
    ("capability", "lacks"),
    [
        ((5, 9), {"cooperative", "tf32"}),
        ((6, 0), {"tf32"}),
        ((7, 9), {"tf32"}),
        ((8, 0), set()),
        ((9, 0), set()),
    ],
)
def test_capabilities_begin_with_a_generation(
    gpu: dict[str, Any], capability: tuple[int, int], lacks: set[str], monkeypatch: Any
) -> None:
    gpu["capability"] = capability
    names = ("cooperative", "tf32", "bf16", "capture", "gpu", "triton", "compile", "fp16")
    found = {name: text for name in names if (text := cannot(name, GPU))}
    words = {
        "cooperative": "this GPU has no cooperative launches",
        "tf32": "this GPU's matrix units have no tf32 mode",
    }
    assert found == {name: words[name] for name in lacks}
    monkeypatch.setattr(torch.version, "hip", "6.3")  # whose numbers mean something else
    assert not any(cannot(name, GPU) for name in names)
    gpu["bf16"] = False
    assert cannot("bf16", GPU) == "this GPU has no bf16"
    assert cannot("bf16", CPU) is None


def test_a_device_that_is_meant_is_there(gpu: dict[str, Any]) -> None:
    assert usable_device("cpu") == CPU
    assert usable_device("cuda") == torch.device("cuda")
    assert usable_device(GPU) == GPU
    for name in ("cuda:1", "cuda:2"):
        with pytest.raises(UsageError) as told:
            usable_device(name)
        assert str(told.value) == f"device {name!r} is not there: torch sees 1 GPUs; use cpu"
    gpu["count"] = 2
    assert usable_device("cuda:1") == torch.device("cuda", 1)
    gpu["count"] = 0
    with pytest.raises(UsageError, match="torch sees 0 GPUs"):
        usable_device("cuda")
    for name in ("gpu", "meta", "cuda:x", "cpu:3", ""):
        with pytest.raises(UsageError) as told:
            usable_device(name)
        assert str(told.value) == f"device {name!r} is unknown: use cpu, cuda or cuda:N"


def test_a_numbered_gpu_is_made_the_current_one(gpu: dict[str, Any]) -> None:
    for name in ("cpu", "cuda"):
        assert current(name) == torch.device(name)
        assert gpu["current"] is None
    assert current("cuda:1") == torch.device("cuda", 1)
    assert gpu["current"] == torch.device("cuda", 1)


def test_the_default_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert default_device() == usable_device(None) == torch.device(name)


def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    synchronize(CPU)
    assert waited == []
    synchronize(GPU)
    assert waited == [GPU]


def test_a_device_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"A Card {device.index}")
    assert device_name(GPU) == "A Card 0"
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    text = "processor\t: 0\nmodel name\t:  A  Processor 9  \nmodel name\t: Another\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert device_name(CPU) == "A Processor 9"
    monkeypatch.setattr(Path, "read_text", lambda path: "Features\t: fp asimd\n")
    for processor, name in (("a chip", "a chip"), ("", "aarch64")):
        monkeypatch.setattr(platform, "processor", lambda processor=processor: processor)
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        assert device_name(CPU) == name
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert device_name(CPU) == "aarch64"


def test_names_and_memory_of_a_machine() -> None:
    assert slug("NVIDIA  H200 (SXM)") == "nvidia-h200-sxm"
    with open("/proc/meminfo") as told:
        total = int(told.readline().split()[1]) * 1024
    assert memory_bytes(CPU) == total


# -- ceilings and overlap -------------------------------------------------------------------------


def test_ceilings_are_of_bytes_both_ways_and_of_two_operations_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, int, str]] = []
    meta = torch.device("meta")  # as a GPU: it has the size of one, and computes nothing

    def least(call: Any, device: torch.device, rounds: int) -> float:
        made = call() if device == meta else None
        asked.append((made, rounds, torch.get_float32_matmul_precision()))
        return 0.5

    monkeypatch.setattr(ceilings, "least_seconds", least)
    monkeypatch.setattr(torch, "randint", lambda low, high, shape, **on: torch.empty(shape, **on))
    assert ceilings.copy_rate(CPU) == 2 * 2**26 / 0.5
    assert ceilings.copy_rate(meta) == 2 * 2**30 / 0.5
    before = torch.get_float32_matmul_precision()
    dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    for precision, dtype in dtypes.items():
        assert ceilings.product_rate(precision, CPU, rounds=3) == 2 * 1024**3 / 0.5
        assert ceilings.product_rate(precision, meta) == 2 * 8192**3 / 0.5
        made, _, mode = asked[-1]
        assert (made.dtype, made.shape) == (dtype, (8192, 8192))
        assert mode == ("high" if precision == "tf32" else "highest")
    assert torch.get_float32_matmul_precision() == before
    assert [one[1] for one in asked] == [10, 10, *[3, 8] * 3]


def test_a_ceiling_is_the_fastest_call_after_some_that_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    times = iter([0.3, 0.1, 0.2])

    class Clock:
        def __init__(self, queue: Any) -> None: ...

        def read(self, call: Any) -> Any:
            call()
            return type("Reading", (), {"device": next(times)})

    monkeypatch.setattr(ceilings, "Clock", Clock)
    assert ceilings.least_seconds(lambda: calls.append(1), CPU, 3) == 0.1
    assert len(calls) == 3 + 3


@pytest.mark.parametrize(
    ("kernels", "collective", "hidden"),
    [
        ([], 0, 0),
        ([("gemm", 0, 5)], 0, 0),
        ([("ncclAllReduce", 0, 5)], 5, 0),
        ([("ncclAllReduce", 0, 5), ("gemm", 3, 9)], 5, 2),
        ([("rccl_sum", 0, 5), ("Memcpy PtoP", 4, 8), ("gemm", 1, 2), ("add", 7, 9)], 8, 2),
        ([("symmetric_memory_barrier", 2, 4), ("gemm", 0, 9)], 2, 2),
        ([("rcclGenericKernel", 1, 3), ("gemm", 0, 2), ("copy_kernel", 2, 4)], 2, 2),
        ([("Memcpy PtoP (Device -> Device)", 0, 1), ("Memcpy DtoD", 0, 2)], 1, 1),
        ([("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", 1, 2)], 1, 0),
    ],
)
def test_what_lies_under_computation(
    kernels: list[tuple[str, float, float]], collective: float, hidden: float
) -> None:
    found = overlap_of(kernels)
    assert (found.collective, found.hidden) == pytest.approx((collective * 1e-6, hidden * 1e-6))
    expected = hidden / collective if collective else None
    assert found.share == (None if expected is None else pytest.approx(expected))


def test_a_share_is_of_the_collectives() -> None:
    assert Overlap(4.0, 1.0).share == 0.25
    assert Overlap(0.0, 0.0).share is None


# -- layouts --------------------------------------------------------------------------------------

STRIDES = {
    "contiguous": (12, 4, 1),
    "strided": (24, 8, 2),
    "transposed": (1, 2, 6),
    "expanded": (0, 4, 1),
    "summed": (0, 0, 0),
    "distinct": (45, 15, 3),  # the third tensor of a call: elements 3 apart, rows of 3 * (4 + 1)
    "offset": (12, 4, 1),
    "padded": (20, 5, 1),
    "swapped": (4, 8, 1),
    "channels_last": (12, 1, 3),
    "single": (12, 4, 1),  # of axes of one entry
    "cut": (16, 4, 1),
    "parted": (12, 4, 1),  # of four axes
    "broadcast": (3, 1, 0),
    "shared": (4, 0, 1),
}
GAPS = {"strided": 24, "distinct": 66, "offset": 2, "padded": 16, "cut": 8}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_each_layout_has_its_strides_and_keeps_its_values(layout: str, dtype: torch.dtype) -> None:
    sample = torch.arange(24.0).view(2, 3, 4)
    found = laid_out(sample, dtype, CPU, layout, 3)
    assert found.shape == sample.shape
    assert found.dtype is dtype
    if layout in TIED and dtype is torch.int64:
        layout = "contiguous"
    assert found.stride() == STRIDES[layout]
    repeated = {"expanded": sample[:1], "summed": sample[:1, :1, :1]}
    repeated |= {"broadcast": sample[..., :1], "shared": sample[:, :1]}
    assert torch.equal(found, repeated.get(layout, sample).expand(2, 3, 4).to(dtype))
    if layout in GAPS:
        whole = found.as_strided((found.untyped_storage().size() // found.itemsize,), (1,), 0)
        empty = whole.isnan() if dtype.is_floating_point else whole == 0
        assert int(empty.sum()) == GAPS[layout] + (dtype is torch.int64)  # where 0 is a value, too


def test_what_has_no_axis_or_one_has_the_layouts_that_it_can() -> None:
    row = torch.arange(4.0)
    for layout in {*LAYOUTS, *UPSTREAMS}:
        assert laid_out(torch.tensor(2.0), torch.float32, CPU, layout, 1).item() == 2.0
        found = laid_out(row, torch.float32, CPU, layout, 2)
        assert torch.equal(found, torch.zeros(4) if layout == "summed" else row)
    with pytest.raises(ValueError, match="unknown layout 'dense': use one of "):
        laid_out(row, torch.float32, CPU, "dense", 1)
    parted = laid_out(torch.ones(2, 3, 4, 5), torch.float32, CPU, "parted", 1)
    assert (parted.shape, parted.stride()) == ((2, 3, 4, 5), (80, 20, 5, 1))
    single = [(1, 4), (4, 1), (2, 1, 4)], [(1, 1), (1, 5), (4, 12, 1)]
    for shape, strides in zip(*single, strict=True):
        found = laid_out(torch.ones(shape), torch.float32, CPU, "single", 1)
        assert found.stride() == strides
        assert found.is_contiguous()
    assert laid_out(torch.ones(2, 3), torch.float32, CPU, "padded", 1).stride() == (4, 1)
    assert laid_out(row, torch.float32, CPU, "padded", 1).untyped_storage().nbytes() == 4 * 5
    for dtype, factor in ((torch.float32, 2.0**-40), (torch.float16, 2.0**-17)):
        assert torch.equal(laid_out(row, dtype, CPU, "faint", 1), row.to(dtype) * factor)


# -- where Triton has no Gluon --------------------------------------------------------------------


def test_without_gluon_a_kernel_has_its_name_and_says_why_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    spec = importlib.util.spec_from_file_location("without_gluon", gluon.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def copies(source: Any, target: Any) -> None: ...

    for made in (module.jit(copies), module.jit(unspecialised=("size",))(copies)):
        assert (made.fn, made.__name__) == (copies, "copies")
        with pytest.raises(RuntimeError, match="copies needs Gluon: this triton has no Gluon"):
            made[(1,)]
    assert module.lacking("sm_90").startswith("this triton has no Gluon")
    assert module.lacking("").startswith("a CPU has not both")
    assert module.lacking("gfx942").startswith("gfx942 has not both")


# -- interruptions --------------------------------------------------------------------------------


def test_interruptions_are_held_until_the_end_and_handlers_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    came: list[int] = []
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in numbers}
    own = [signal.getsignal(one) for one in numbers]
    try:
        for sent in ([], [signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]):
            came.clear()
            with held_interrupts() as held:
                for one in sent:
                    signal.raise_signal(one)
                assert (held, came) == (sent, [])
            assert came == sent[:1], "one ends the program"
            assert [signal.getsignal(one) for one in numbers] == own
        came.clear()
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"), sigterm_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
        assert [signal.getsignal(one) for one in numbers] == own
        found: list[Any] = []

        def elsewhere() -> None:
            with held_interrupts() as held, sigterm_as_interrupt():
                found.extend([held, *(signal.getsignal(one) for one in numbers)])

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert found == [[], *own], "only the main thread receives signals"
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
