"""What a call launches: kernels, copies, waits of the host, and where the time goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# A copy that was captured is a kernel (memcpy32_post, memcpy128) where a profiler was attached
# before the capture, and a Memcpy where it came later (pytorch 191284).
_COPY = re.compile(r"^[Mm]em(cpy|set)")

# The first pattern that is found in the name of a kernel, or of an operator on a CPU, decides.
# Names of cuBLAS (nvjet, gemm, cutlass), hipBLASLt and Tensile (Cijk), cuDNN, flash attention,
# of CUDA and of AOTriton (bwd_kernel_dq), torch's own kernels, and the compiler's (triton_tem_*
# are its products).
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
    """Of one call. ``busy_seconds``: in which the device worked; ``time_by``: the same by kind;
    ``by_name``: of each kernel, how often and how long in all.

    On a CPU there are no launches: counts are None, and the times are those of operators.
    """

    kernels: int | None
    copies: int | None
    host_syncs: int | None
    busy_seconds: float
    time_by: dict[str, float]
    by_name: dict[str, tuple[int, float]] = field(default_factory=dict)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")


def launches(call: Callable[[], object], device: torch.device) -> Launches:
    """Profile one call, which must have run before. The profiler slows the host, not kernels."""
    gpu = device.type != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    if gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        with record_function(_RANGE):
            call()
        if gpu:
            torch.cuda.synchronize(device)
    events = list(profiler.events())
    # The range appears on the host and, from its first kernel to its last, on the device.
    on_host = torch.autograd.DeviceType.CPU
    within = next(e.time_range for e in events if e.name == _RANGE and e.device_type == on_host)
    events = [e for e in events if e.name != _RANGE and not e.is_user_annotation]
    if not gpu:
        return _of_operators(events)
    on_device = [e for e in events if e.device_type != on_host]
    copies = sum(1 for e in on_device if _COPY.search(e.name))
    waits = sum(
        1
        for e in events
        if _WAITS.search(e.name) and within.start <= e.time_range.start <= within.end
    )
    pageable = sum(1 for e in on_device if _PAGEABLE.search(e.name))
    spans = [(e.time_range.start, e.time_range.end) for e in on_device]
    timed = [(e.name, e.time_range.end - e.time_range.start) for e in on_device]
    return Launches(
        kernels=len(on_device) - copies,
        copies=copies,
        host_syncs=waits + pageable,
        busy_seconds=_union(spans) * 1e-6,
        time_by=_by_kind(timed),
        by_name=_by_name(timed),
    )


def _of_operators(events: list[torch.autograd.profiler_util.FunctionEvent]) -> Launches:
    timed = [(e.name, e.self_cpu_time_total) for e in events]
    times = _by_kind(timed)
    return Launches(None, None, None, sum(times.values()), times, _by_name(timed))


def _by_kind(timed: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds of each kind, from names and microseconds."""
    total: dict[str, float] = {}
    for name, microseconds in timed:
        kind = kind_of(name)
        total[kind] = total.get(kind, 0.0) + microseconds * 1e-6
    return total


def _by_name(timed: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    """Of each name how often, and seconds in all, from names and microseconds."""
    total: dict[str, tuple[int, float]] = {}
    for name, microseconds in timed:
        count, seconds = total.get(name, (0, 0.0))
        total[name] = (count + 1, seconds + microseconds * 1e-6)
    return total


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """The length covered by intervals that may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
