"""What a GPU's management library tells: values in units, reasons, energy, and what disturbs.

Two simulated libraries stand for NVML and AMD SMI, by their documented names and units.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tinyllama.harness.machine import facts
from tinyllama.harness.machine.sensors import Sensor, sensor

CPU, GPU = torch.device("cpu"), torch.device("cuda")
UUID = "8e4b1d52-1111-2222-3333-444455556666"
CALM = {f"active_{name}": False for name in ("prochot_thrm", "ppt_pwr", "socket_thrm", "hbm_thrm")}
READINGS = {
    "driver": "580.65.06",
    "power_limit_watts": 700,
    "energy_joules": 4.5,
    "processes": [41],
    "busy_share": 0.37,
    "throttled": None,
}


@dataclass
class Device:
    """What torch says of a GPU."""

    uuid: str
    pci_bus_id: int
    pci_domain_id: int


class Process(NamedTuple):
    pid: int


class Utilization(NamedTuple):
    gpu: int


def simulated_nvml() -> Any:
    """The module ``pynvml`` on a machine with one GPU: mW, mJ, percent, a mask of reasons."""
    nvml: Any = ModuleType("pynvml")
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = {f"GPU-{UUID}": "handle"}.__getitem__
    nvml.nvmlSystemGetDriverVersion = lambda: "580.65.06"
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 4_500
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [Process(41)]
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: Utilization(37)
    nvml.nvmlClocksThrottleReasonHwSlowdown = 8
    nvml.nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvml.nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 4  # the power cap
    return nvml


def simulated_amdsmi() -> Any:
    """The module ``amdsmi`` on a machine with three GPUs: uW, W, counts of uJ, percent."""
    smi: Any = ModuleType("amdsmi")
    smi.amdsmi_init = lambda: None
    smi.amdsmi_get_processor_handles = lambda: ["0000:0c:00.0", "0001:0c:00.0", "0000:22:00.0"]
    smi.amdsmi_get_gpu_device_bdf = lambda handle: handle
    smi.answers = {
        "gpu_driver_info": {"driver_version": "580.65.06"},
        "power_cap_info": {"power_cap": 700_000_000},
        "energy_count": {"energy_accumulator": 300_000, "counter_resolution": 15.0},
        "gpu_activity": {"gfx_activity": 37},
        "gpu_process_list": [{"name": "python", "pid": 41}],
        "violation_status": dict(CALM),
    }
    for name, answer in smi.answers.items():
        setattr(smi, f"amdsmi_get_{name}", lambda handle, answer=answer: answer)
    return smi


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The simulated library of that name, the only one that is installed."""
    name = getattr(request, "param", "pynvml")
    module = simulated_nvml() if name == "pynvml" else simulated_amdsmi()
    for installed in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, installed, module if installed == name else None)
    properties = Device(UUID, pci_bus_id=0x0C, pci_domain_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return module


def gpu_sensor() -> Sensor:
    gpu = sensor(GPU)
    assert not isinstance(gpu, str), gpu
    return gpu


each_library = pytest.mark.parametrize("library", ["pynvml", "amdsmi"], indirect=True)
amd = pytest.mark.parametrize("library", ["amdsmi"], indirect=True)


@each_library
@pytest.mark.parametrize("reading", READINGS)
def test_a_reading_is_in_its_unit(library: Any, reading: str) -> None:
    assert getattr(gpu_sensor(), reading)() == READINGS[reading]


@pytest.mark.parametrize(
    ("mask", "words"),
    [(32 | 4, "software thermal slowdown"), (8 | 128, "hardware slowdown, power")],
)
def test_nvml_says_why_clocks_are_lowered(library: Any, mask: int, words: str) -> None:
    library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: mask
    assert str(gpu_sensor().throttled()).startswith(words)


@amd
@pytest.mark.parametrize(
    ("violations", "words"),
    [
        ({"active_ppt_pwr": True}, None),  # the power cap is how a GPU works at full load
        ({"active_socket_thrm": True}, "socket thermal limit"),
    ],
)
def test_amdsmi_says_why_clocks_are_lowered(
    library: Any, violations: dict[str, Any], words: str | None
) -> None:
    library.answers["violation_status"].update(violations)
    assert gpu_sensor().throttled() == words


@amd
def test_amdsmi_does_not_guess_which_gpu_a_device_is(library: Any) -> None:
    assert vars(gpu_sensor())["handle"] == "0001:0c:00.0"
    properties: Any = torch.cuda.get_device_properties(GPU)
    properties.pci_bus_id = 0x0D
    assert "0 of 3 GPUs are on PCI domain" in str(sensor(GPU))


def test_a_device_without_a_sensor_has_a_reason_for_each_library(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reason = str(sensor(GPU))
    assert "NvmlSensor: ModuleNotFoundError: " in reason
    assert "AmdSmiSensor: ModuleNotFoundError: " in reason
    assert "pip install 'tinyllama-harness[sensors]'" in reason
    assert sensor(CPU) == "a CPU has no GPU sensor"


@amd
def test_a_record_has_what_is_read_and_reasons_for_the_rest(library: Any) -> None:
    library.answers["power_cap_info"]["power_cap"] = "N/A"
    machine = facts.describe(GPU)
    assert {"processor", "cores", "memory_bytes", "system", "driver"} < set(machine)
    assert machine["unavailable"] == {"power_limit_watts": "amdsmi does not know power_cap"}


# -- what disturbs ----------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[Callable[..., int]]:
    """Starts a process, in a group of its own as those of other users are, or in this one."""
    processes = []

    def start(group_of_its_own: bool) -> int:
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        processes.append(subprocess.Popen(sleep, start_new_session=group_of_its_own))
        return processes[-1].pid

    yield start
    for running in processes:
        running.kill()
        running.wait()


def test_another_process_disturbs_and_a_worker_does_not(
    library: Any, process: Callable[..., int]
) -> None:
    library.nvmlDeviceGetUtilizationRates = lambda handle: Utilization(0)
    elsewhere = 2**22 + 1  # in a container the ids are those of the host
    pids = [os.getpid(), process(group_of_its_own=False), elsewhere]
    library.nvmlDeviceGetComputeRunningProcesses = lambda handle: [*map(Process, pids)]
    assert facts.disturbance(GPU) is None
    pids.append(process(group_of_its_own=True))
    assert facts.disturbance(GPU) == f"other processes compute on the GPU: {pids[-1]}"


@pytest.mark.long
def test_a_busy_or_throttled_gpu_disturbs(library: Any) -> None:
    """A busy one has 3 s to become idle."""
    library.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    assert facts.disturbance(GPU) == "the GPU is 37% busy with nothing of ours running"
    library.nvmlDeviceGetUtilizationRates = lambda handle: Utilization(0)
    library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 128
    assert facts.disturbance(GPU) == "the GPU is throttled: power brake"
