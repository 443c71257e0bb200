"""What one call launches: kernels, copies and synchronisations, and how long each kernel takes."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from tinyllama.harness.kernels.kernel_names import multiplies

# A captured copy is a kernel (memcpy32_post, memcpy128) where a profiler was attached before the
# capture, and a Memcpy where it was attached later (pytorch 191284).
_COPY = re.compile(r"^[Mm]em(cpy|set)")

# The kind of a kernel, or of an operator on a CPU, is the first one whose pattern its name has. The
# names are those of cuBLAS (nvjet, gemm, cutlass), hipBLASLt and Tensile (Cijk), cuDNN, flash
# attention, CUDA and AOTriton (bwd_kernel_dq), torch's own kernels, and those of the compiler
# (triton_tem_* are its products).
KINDS = {
    "copies": re.compile(_COPY.pattern + r"|aten::copy_$|^transpose$"),
    "optimizer": re.compile(r"adam|multi_tensor_apply|FusedOptimizer", re.IGNORECASE),
    # The compiler names what it fuses around attention (poi, red, per) after it as well.
    "attention": re.compile(
        r"^(?!triton_(poi|red|per)_).*(flash|fmha|attention|sdpa|attn|softmax.*scores)"
        r"|^bwd_(kernel|preprocess)",
        re.IGNORECASE,
    ),
    "products": re.compile(
        r"gem[mv]|nvjet|cutlass|cublas|xmma|Cijk|triton_tem|splitK|::(mm|bmm|addmm|baddbmm)$",
        re.IGNORECASE,
    ),
    "elementwise": re.compile(
        r"elementwise|reduce|triton_|softmax|norm|Cat|embedding|index|fill|rope|silu|swiglu|entropy"
        r"|vectorized|aten::",
        re.IGNORECASE,
    ),
}
_WAITS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$")
_PAGEABLE = re.compile(r"^Memcpy DtoH .*Pageable")
_RANGE = "launches.call"


@dataclass(frozen=True)
class Launches:
    """Counts and times of one call. busy_seconds: the time in which the device worked; by_name: for
    each kernel the number of launches and the total seconds.

    On a CPU nothing is launched: counts are None, and times are those of operators.
    """

    kernels: int | None
    copies: int | None
    host_syncs: int | None
    busy_seconds: float
    by_name: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """The counts and times that are known, by their names in records."""
        named = {"kernels": self.kernels, "copies": self.copies, "host_syncs": self.host_syncs}
        return {name: count for name, count in named.items() if count is not None}


def kind_of(name: str) -> str:
    """The kind of a kernel or operator. Our own kernels with matrix products are products,
    whatever else is in their prologues and epilogues."""
    kind = next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")
    product = multiplies(name)
    if product is None or kind not in ("elementwise", "other"):
        return kind
    return "products" if product else "elementwise"


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What the profiler watches of a call on a device."""
    gpu = [ProfilerActivity.CUDA] if device.type != "cpu" else []
    return [ProfilerActivity.CPU, *gpu]


def on_device(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """What a GPU did, without the ranges that the host named."""
    return [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]


def launches(call: Callable[[], object], device: torch.device) -> Launches:
    """Profile one call, which must have run before. The profiler slows the host, not kernels."""
    gpu = device.type != "cpu"
    if gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities(device), acc_events=True) as profiler:
        with record_function(_RANGE):
            call()
        if gpu:
            torch.cuda.synchronize(device)
    events = list(profiler.events())
    # The range appears on the host and, from its first kernel to its last, on the device.
    called = (e for e in events if e.name == _RANGE and e.device_type == DeviceType.CPU)
    within = next(called).time_range
    events = [e for e in events if e.name != _RANGE and not e.is_user_annotation]
    if not gpu:
        return _of_operators(events)
    on_gpu = on_device(events)
    copies = sum(bool(_COPY.search(e.name)) for e in on_gpu)
    pageable = sum(bool(_PAGEABLE.search(e.name)) for e in on_gpu)
    during_call = [e for e in events if within.start <= e.time_range.start <= within.end]
    waits = sum(bool(_WAITS.search(e.name)) for e in during_call)
    spans = [(e.time_range.start, e.time_range.end) for e in on_gpu]
    timed = [(e.name, e.time_range.end - e.time_range.start) for e in on_gpu]
    return Launches(
        kernels=len(on_gpu) - copies,
        copies=copies,
        host_syncs=waits + pageable,
        busy_seconds=covered(spans) * 1e-6,
        by_name=totals_by_name(timed),
    )


def _of_operators(events: list[FunctionEvent]) -> Launches:
    timed = [(e.name, e.self_cpu_time_total) for e in events]
    total = sum(microseconds for _, microseconds in timed) * 1e-6
    return Launches(None, None, None, total, totals_by_name(timed))


def totals_by_name(timed: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    """The number of entries of each name and their seconds, from names and microseconds."""
    microseconds_of: defaultdict[str, list[float]] = defaultdict(list)
    for name, microseconds in timed:
        microseconds_of[name].append(microseconds)
    return {name: (len(times), sum(times) * 1e-6) for name, times in microseconds_of.items()}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length covered by intervals that may overlap."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
