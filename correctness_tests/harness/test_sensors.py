"""What a GPU's management library tells: values, units, and what it does not know, by reason.

Two made-up libraries stand for NVML and AMD SMI, by their documented names and units.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.machine import facts as machine
from tinyllama.harness.machine.sensors import AmdSmiSensor, NotToldError, NvmlSensor, Sensor, sensor

CPU, GPU = torch.device("cpu"), torch.device("cuda")
UUID = "8e4b1d52-1111-2222-3333-444455556666"
VIOLATIONS = ("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm")
CALM = {f"active_{name}": False for name in VIOLATIONS}
TELLS = ("driver", "power_limit_watts", "clocks_mhz", "energy_joules", "watts", "busy_share")


def made_up_nvml() -> Any:
    """The module ``pynvml`` on a machine with one GPU: mW, mJ, percent, a mask of reasons."""
    nvml: Any = ModuleType("pynvml")
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM = 1, 2
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = {f"GPU-{UUID}": "handle"}.__getitem__
    nvml.nvmlSystemGetDriverVersion = lambda: "580.65.06"
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 312_500
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 4_500
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: {1: 1755, 2: 3201}[kind]
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: {1: 1980, 2: 3202}[kind]
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [SimpleNamespace(pid=41)]
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=37, memory=90)
    nvml.nvmlClocksThrottleReasonSwPowerCap = 4
    nvml.nvmlClocksThrottleReasonHwSlowdown = 8
    nvml.nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvml.nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 4
    return nvml


def made_up_amdsmi() -> Any:
    """The module ``amdsmi`` on a machine with two GPUs: uW, W, counts of 15.3 uJ, percent."""
    smi: Any = ModuleType("amdsmi")
    smi.AmdSmiClkType = SimpleNamespace(GFX="gfx", MEM="mem")
    smi.amdsmi_init = lambda: None
    smi.amdsmi_get_processor_handles = lambda: ["0000:0c:00.0", "0001:0c:00.0", "0000:22:00.0"]
    smi.amdsmi_get_gpu_device_bdf = lambda handle: handle
    clocks = {"gfx": {"clk": 2100, "max_clk": 2101}, "mem": {"clk": 900, "max_clk": 1300}}
    answers: dict[str, Any] = {
        "gpu_driver_info": {"driver_version": "6.12.12"},
        "power_cap_info": {"power_cap": 1_000_000_000},
        "power_info": {"current_socket_power": 640, "average_socket_power": "N/A"},
        "energy_count": {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        "gpu_activity": {"gfx_activity": 37},
        "gpu_process_list": [{"name": "python", "pid": 41}],
        "violation_status": dict(CALM),
        "gpu_metrics_info": {"throttle_status": "N/A"},
    }
    for name, answer in answers.items():
        setattr(smi, f"amdsmi_get_{name}", lambda handle, answer=answer: answer)
    smi.amdsmi_get_clock_info = lambda handle, kind: clocks[kind]
    smi.answers, smi.clocks = answers, clocks
    return smi


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = made_up_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    known = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    return made


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = made_up_amdsmi()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", made)
    made.device = SimpleNamespace(pci_bus_id=0x0C, pci_domain_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made.device)
    return made


def found() -> Sensor:
    gpu = sensor(GPU)
    assert not isinstance(gpu, str), gpu
    return gpu


# -- one library, the other, or neither -------------------------------------------------------


def test_nvml_in_watts_joules_and_shares(nvml: Any) -> None:
    gpu = found()
    assert isinstance(gpu, NvmlSensor)
    assert gpu.driver() == "580.65.06"
    assert gpu.power_limit_watts() == 700
    assert gpu.watts() == 312.5
    assert gpu.energy_joules() == 4.5
    assert gpu.clocks_mhz() == {"sm": 1755, "memory": 3201, "sm_max": 1980, "memory_max": 3202}
    assert gpu.processes() == [41]
    assert gpu.busy_share() == 0.37


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, None),
        (4, None),  # the power cap: how a GPU works at full load
        (8, "hardware slowdown"),
        (32 | 4, "software thermal slowdown"),
        (8 | 64, "hardware slowdown, hardware thermal slowdown"),
        (128, "power brake"),
    ],
)
def test_nvml_tells_why_clocks_are_held_down(nvml: Any, mask: int, words: str | None) -> None:
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: mask
    assert found().throttled() == words


def test_amdsmi_in_watts_joules_and_shares(smi: Any) -> None:
    gpu = found()
    assert isinstance(gpu, AmdSmiSensor)
    assert gpu.handle == "0001:0c:00.0", "the same bus in another domain is another GPU"
    assert gpu.driver() == "6.12.12"
    assert gpu.power_limit_watts() == 1000
    assert gpu.watts() == 640
    assert gpu.energy_joules() == pytest.approx(30.6)
    assert gpu.clocks_mhz() == {"sm": 2100, "memory": 900, "sm_max": 2101, "memory_max": 1300}
    assert gpu.processes() == [41]
    assert gpu.busy_share() == 0.37
    assert gpu.throttled() is None


def test_amdsmi_has_the_words_of_older_cards_and_releases(smi: Any) -> None:
    smi.answers["power_info"].update(current_socket_power="N/A", average_socket_power=250)
    smi.answers["energy_count"]["power"] = smi.answers["energy_count"].pop("energy_accumulator")
    gpu = found()
    assert gpu.watts() == 250
    assert gpu.energy_joules() == pytest.approx(30.6)
    smi.answers["violation_status"].update(dict.fromkeys(CALM, "N/A"))
    smi.answers["gpu_metrics_info"]["throttle_status"] = False
    assert gpu.throttled() is None
    smi.answers["gpu_metrics_info"]["throttle_status"] = True
    assert gpu.throttled() == "the driver reports throttling"
    del smi.amdsmi_get_violation_status
    assert gpu.throttled() == "the driver reports throttling"


def test_amdsmi_tells_why_clocks_are_held_down(smi: Any) -> None:
    smi.answers["violation_status"].update(active_ppt_pwr=True)
    assert found().throttled() is None, "the power cap is how a GPU works at full load"
    smi.answers["violation_status"].update(active_socket_thrm="N/A")
    assert found().throttled() is None, "what is not known is not held against it"
    smi.answers["violation_status"].update(active_socket_thrm=True, active_hbm_thrm=True)
    assert found().throttled() == "socket thermal limit, memory thermal limit"
    for name, words in (("prochot_thrm", "processor hot"), ("hbm_thrm", "memory thermal limit")):
        alone = {**dict.fromkeys(smi.answers["violation_status"], "N/A"), f"active_{name}": True}
        smi.amdsmi_get_violation_status = lambda handle, alone=alone: alone
        assert found().throttled() == words, "alone of those that are known"


def test_amdsmi_does_not_guess_which_gpu_it_is(smi: Any) -> None:
    smi.device = SimpleNamespace(pci_bus_id=0x22)  # a torch that tells no domain
    assert vars(found())["handle"] == "0000:22:00.0"
    for vague in (SimpleNamespace(pci_bus_id=0x0C), SimpleNamespace()):
        smi.device = vague
        assert "of 3 GPUs are on PCI domain" in str(sensor(GPU))
    smi.amdsmi_get_processor_handles = lambda: ["0000:05:00.0"]
    assert vars(found())["handle"] == "0000:05:00.0", "the only one is it"


def test_a_device_that_neither_knows_has_a_reason_naming_both(nvml: Any) -> None:
    def fails() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    nvml.nvmlInit = fails
    reason = str(sensor(GPU))
    assert "NvmlSensor: RuntimeError: NVML Shared Library Not Found" in reason
    assert "AmdSmiSensor: ModuleNotFoundError: " in reason
    assert "pip install 'tinyllama-harness[sensors]'" in reason
    assert sensor(CPU) == "a CPU has no GPU sensor"


@pytest.mark.parametrize("method", TELLS)
def test_what_amdsmi_does_not_know_has_a_reason(smi: Any, method: str) -> None:
    for answer in (*smi.answers.values(), *smi.clocks.values()):
        if isinstance(answer, dict):
            answer.update(dict.fromkeys(answer, "N/A"))
    with pytest.raises(NotToldError, match="amdsmi does not know "):
        getattr(found(), method)()


@pytest.mark.parametrize("method", [*TELLS, "processes", "throttled"])
def test_what_a_library_refuses_has_a_reason(nvml: Any, method: str) -> None:
    class NotSupportedError(Exception):
        """As NVMLError_NotSupported: an exception of the library's own."""

    def refused(*_: Any) -> None:
        raise NotSupportedError("Not Supported")

    gpu = found()
    for name in [name for name in vars(nvml) if "Get" in name]:
        setattr(nvml, name, refused)
    with pytest.raises(
        NotToldError, match=f"NvmlSensor.{method}: NotSupportedError: Not Supported"
    ):
        getattr(gpu, method)()


# -- the machine of a record ------------------------------------------------------------------

HOST = {"processor", "cores", "memory_bytes", "system"}


def test_a_cpu_is_described_without_a_gpu() -> None:
    told = machine.describe(CPU)
    assert set(told) == HOST
    assert told["processor"]
    assert told["cores"] >= 1
    assert told["memory_bytes"] > 2**28


def test_what_a_sensor_does_not_tell_is_absent_with_its_reason(smi: Any) -> None:
    smi.answers["power_cap_info"]["power_cap"] = "N/A"
    told = machine.describe(GPU)
    assert set(told) == {*HOST, "driver", "clocks_mhz", "unavailable"}
    assert told["unavailable"] == {"power_limit_watts": "amdsmi does not know power_cap"}
