"""What a GPU's management library reports: driver, power, energy, other processes.

There are two such libraries, NVML and AMD SMI. `sensor` tries both: a device that neither of them
knows has no sensor, and the reason is given instead.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from tinyllama.harness.machine.distribution import install

T = TypeVar("T")


class NotToldError(LookupError):
    """A value that a management library cannot give; the message says why."""


class Sensor(Protocol):
    """One GPU. Every method raises NotToldError where the library has no answer."""

    def driver(self) -> str: ...

    def power_limit_watts(self) -> float: ...

    def energy_joules(self) -> float:
        """A counter that began at some moment in the past; it may advance in steps."""

    def processes(self) -> list[int]:
        """The ids of processes that compute on the GPU, as far as they are visible."""

    def busy_share(self) -> float:
        """The share of the last moments in which some kernel ran, 0 to 1."""

    def throttled(self) -> str | None:
        """Why the hardware lowers the clocks now; the power cap does not count as a reason."""


METHODS = [name for name in vars(Sensor) if not name.startswith("_")]


def _translate_errors(library: type[T]) -> type[T]:
    """Have the methods of `Sensor` raise NotToldError: each library has errors of its own."""

    def translated(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(method)
        def call(self: Any) -> Any:
            try:
                return method(self)
            except NotToldError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise NotToldError(f"{library.__name__}.{method.__name__}: {reason}") from error

        return call

    for name in METHODS:
        setattr(library, name, translated(getattr(library, name)))
    return library


@_translate_errors
class NvmlSensor:
    """Through nvidia-ml-py (the module ``pynvml``)."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = importlib.import_module("pynvml")
        self.nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.handle = self.nvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        )

    def driver(self) -> str:
        return str(self.nvml.nvmlSystemGetDriverVersion())

    def power_limit_watts(self) -> float:
        return self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3

    def energy_joules(self) -> float:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3

    def processes(self) -> list[int]:
        return [p.pid for p in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)]

    def busy_share(self) -> float:
        return self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100

    def throttled(self) -> str | None:
        reasons = self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        named = {
            "hardware slowdown": self.nvml.nvmlClocksThrottleReasonHwSlowdown,
            "hardware thermal slowdown": self.nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "software thermal slowdown": self.nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
            "power brake": self.nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }
        return ", ".join(name for name, bit in named.items() if reasons & bit) or None


@_translate_errors
class AmdSmiSensor:
    """Through amdsmi, written from the documentation of ROCm 6.4 and the code of 7.0.2; never run
    on hardware. amdsmi gives the string "N/A" for a value that it does not know."""

    def __init__(self, device: torch.device) -> None:
        self.smi: Any = importlib.import_module("amdsmi")
        self.smi.amdsmi_init()
        handles = self.smi.amdsmi_get_processor_handles()
        self.handle = handles[_index_of(device, [self._bus(h) for h in handles])]

    def _bus(self, handle: Any) -> tuple[int, int]:
        """Domain and bus of ``domain:bus:device.function``."""
        domain, bus, _ = self.smi.amdsmi_get_gpu_device_bdf(handle).split(":")
        return int(domain, 16), int(bus, 16)

    def driver(self) -> str:
        return str(_known(self.smi.amdsmi_get_gpu_driver_info(self.handle), "driver_version"))

    def power_limit_watts(self) -> float:
        return _known(self.smi.amdsmi_get_power_cap_info(self.handle), "power_cap") / 1e6

    def energy_joules(self) -> float:
        count = self.smi.amdsmi_get_energy_count(self.handle)
        microjoules = _known(count, "energy_accumulator") * _known(count, "counter_resolution")
        return microjoules * 1e-6

    def processes(self) -> list[int]:
        return [p["pid"] for p in self.smi.amdsmi_get_gpu_process_list(self.handle)]

    def busy_share(self) -> float:
        return _known(self.smi.amdsmi_get_gpu_activity(self.handle), "gfx_activity") / 100

    def throttled(self) -> str | None:
        status = self.smi.amdsmi_get_violation_status(self.handle)
        active = {words: status.get(name) for name, words in _VIOLATIONS.items()}
        if not any(isinstance(value, bool) for value in active.values()):
            raise NotToldError("amdsmi does not know whether clocks are lowered")
        return ", ".join(words for words, value in active.items() if value is True) or None


# The power limit (ppt_pwr) is not among them. GPUs before MI300 know none.
_VIOLATIONS = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "socket thermal limit",
    "active_vr_thrm": "voltage regulator thermal limit",
    "active_hbm_thrm": "memory thermal limit",
}


def _known(info: Mapping[str, Any], name: str) -> Any:
    """A field whose value amdsmi knows."""
    if info.get(name, "N/A") == "N/A":
        raise NotToldError(f"amdsmi does not know {name}")
    return info[name]


def _index_of(device: torch.device, buses: list[tuple[int, int]]) -> int:
    """The index of a device among GPUs with these PCI domains and buses; 0 if there is only one."""
    properties = torch.cuda.get_device_properties(device)
    bus = getattr(properties, "pci_bus_id", None)
    domain = getattr(properties, "pci_domain_id", None)
    indices = [i for i, (d, b) in enumerate(buses) if b == bus and domain in (None, d)]
    if len(indices) == 1:
        return indices[0]
    if len(buses) == 1:
        return 0
    raise LookupError(f"{len(indices)} of {len(buses)} GPUs are on PCI domain {domain}, bus {bus}")


KINDS: tuple[type[NvmlSensor] | type[AmdSmiSensor], ...] = (NvmlSensor, AmdSmiSensor)


def sensor(device: torch.device) -> Sensor | str:
    """The sensor of a device, or why there is none."""
    if device.type == "cpu":
        return "a CPU has no GPU sensor"
    reasons = []
    for kind in KINDS:
        try:
            return kind(device)
        except Exception as error:  # each library has exceptions of its own
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {error}")
    return f"no sensor ({install('sensors')}): {'; '.join(reasons)}"
