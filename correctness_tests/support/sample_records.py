"""SYNTHETIC records of every kind, for tests of what is made from records. Nothing in this file
was measured: the figures follow from simple formulas, and every device says SYNTHETIC."""

import math
from collections.abc import Sequence
from typing import Any

from tinyllama.harness.records.entries import (
    CeilingEntry,
    Entry,
    OpEntry,
    Quartiles,
    Ratio,
    StepEntry,
)
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import SPEED, Target

FIRST, SECOND = "SYNTHETIC device A", "SYNTHETIC device B"
DATES = ("2026-01-05T09:00:00Z", "2026-02-09T09:00:00Z", "2026-03-02T09:00:00Z")
VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0"}
MACHINE = {
    "processor": "SYNTHETIC processor",
    "cores": 16,
    "memory_bytes": 128 * 2**30,
    "system": "Linux 6.1",
    "driver": "580.95",
    "power_limit_watts": 700,
}

# contender -> role, title, milliseconds of a step of small-bf16, kernels
CONTENDERS: dict[str, tuple[str, str, float, int]] = {
    "floor": ("floor", "products, attention and optimizer alone", 0.62, 60),
    "v1": ("tier", "PyTorch baseline", 24.1, 1460),
    "v2": ("tier", "PyTorch fused", 1.86, 390),
    "v3": ("tier", "Triton kernels", 0.97, 170),
    "hf-eager": ("peer", "Hugging Face Llama, eager", 27.4, 1890),
    "hf-compiled": ("peer", "Hugging Face Llama, torch.compile", 2.71, 410),
    "liger": ("peer", "Hugging Face Llama with Liger kernels", 9.8, 730),
    "torchtitan": ("peer", "torchtitan's Llama, torch.compile", 2.2, 402),
}
# op -> FLOP/byte and bytes of a large case
OPS = {
    "rms_norm": (1.75, 400e6),
    "add_rms_norm": (1.5, 560e6),
    "rope": (0.75, 330e6),
    "attention": (210.0, 180e6),
    "qkv": (380.0, 250e6),
    "swiglu": (228.0, 420e6),
    "cross_entropy": (2.5, 500e6),
    "linear_cross_entropy": (310.0, 300e6),
    "adamw": (0.62, 900e6),
    "block": (435.0, 800e6),
}
PROVIDERS = {"eager": 0.31, "torch": 0.62, "triton": 0.88, "liger": 0.71}
PEER_PROVIDERS = ("liger",)
BANDWIDTH, PEAK = 4.1e12, 720e12


def ratio(value: float, width: float = 0.02) -> Ratio:
    return Ratio(value, value * (1 - width), value * (1 + width))


def record(
    group: str,
    entries: Sequence[Entry],
    device: str = FIRST,
    date: str = DATES[-1],
    **other: Any,
) -> Record:
    """A complete record, unless ``other`` says otherwise."""
    fields: dict[str, Any] = {
        "machine": MACHINE,
        "versions": VERSIONS,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": "pytest perf_tests --record",
        "complete": True,
        **other,
    }
    return Record(group=group, device=device, date=date, entries=list(entries), **fields)


def plain_record(**fields: Any) -> Record:
    """The smallest record, with these fields instead of its own; it has no entries."""
    smallest: dict[str, Any] = {
        "group": "g",
        "device": "A Card",
        "machine": {},
        "versions": {"torch": "2.0"},
        "commit": "a" * 40,
        "date": "2030-01-02T03:04:05Z",
        "command": "pytest",
        "complete": True,
        "entries": [],
    }
    return Record(**{**smallest, **fields})


def step(group: str, contender: str, scale: float = 1.0, **changed: Any) -> StepEntry:
    """A step of ``group`` ("small-bf16"); scale: multiplies the times."""
    role, title, milliseconds, kernels = CONTENDERS[contender]
    seconds = milliseconds * 1e-3 * scale
    fields: dict[str, Any] = {
        "title": title,
        "software": f"{contender} 1.2.3" if role == "peer" else "torch 2.11.0",
        "plan": "eager" if contender in ("v1", "hf-eager", "liger") else "compile + capture",
        "left_out": {"capture": "SYNTHETIC: allocates within a step"} if role == "peer" else {},
        "seconds": seconds,
        "seconds_quartiles": Quartiles(seconds * 0.97, seconds * 1.04),
        "rounds": 100,
        "kernels": kernels,
        "copies": 2,
        "host_syncs": 0,
        "samples_per_second": 8 / seconds,
        "mfu": 0.25e12 / seconds / PEAK,
        "live_bytes": 512e6,
        "peak_bytes": (900 + kernels / 2) * 1e6,
        "joules_per_sample": seconds * 60,
        "watts": 480,
    }
    if role == "floor":
        fields["parts"] = {"products": 0.4e-3, "attention": 0.12e-3, "optimizer": 0.1e-3}
    else:
        over = ratio(CONTENDERS["v1"][2] / milliseconds, 0.0 if contender == "v1" else 0.02)
        fields |= {
            "baseline": "v1",
            "over_baseline": over,
            "over": {"v1": over},
            "floor_share": ratio(CONTENDERS["floor"][2] / milliseconds),
            "gradients": 74,
            "parameters": 74,
        }
    return bare_step(group, contender, role, **{**fields, **changed})


def bare_step(group: str, contender: str, role: str = "tier", **fields: Any) -> StepEntry:
    """A step of ``group`` with these fields and no others."""
    workload, precision = group.split("-")
    named = {"name": f"step/{group}/{contender}", "contender": contender, "role": role}
    return StepEntry(**{**named, "workload": workload, "precision": precision, **fields})


def steps(group: str, scale: float = 1.0) -> list[StepEntry]:
    reason = "SYNTHETIC: needs a toolkit that is not installed"
    absent = bare_step(group, "megatron", "peer", cannot=reason)
    return [*(step(group, name, scale) for name in CONTENDERS), absent]


def ops(dtype: str = "bf16") -> list[Entry]:
    """Every op by every provider, in both passes and two cases; and the ceilings."""
    entries: list[Entry] = [
        CeilingEntry(name="ceiling/copy", bytes_per_second=BANDWIDTH),
        CeilingEntry(name=f"ceiling/product-{dtype}", flops_per_second=PEAK),
    ]
    for index, op in enumerate(OPS):
        for provider, share in PROVIDERS.items():
            for passes in ("forward", "forward+backward"):
                for size in (1.0, 0.1):
                    wobble = 1 + 0.25 * math.sin(7 * index + 3 * len(provider) + len(passes))
                    entries.append(_op(op, provider, dtype, passes, size, share * wobble * 0.8))
    return entries


def _op(op: str, provider: str, dtype: str, passes: str, size: float, share: float) -> OpEntry:
    intensity, count = OPS[op]
    count *= size * (3 if passes != "forward" else 1)
    flops = count * intensity * (1 if passes == "forward" else 1.2)
    least = max(count / BANDWIDTH, flops / PEAK)
    seconds = least / (share * size**0.2)
    case = f"B={8 * size:g},T=2048"
    return OpEntry(
        name=f"op/{op}-{provider}-{case}-{dtype}-normal/{passes}",
        op=op,
        provider=provider,
        role="peer" if provider in PEER_PROVIDERS else "ours",
        case=case,
        dtype=dtype,
        values="normal",
        passes=passes,
        seconds=seconds,
        seconds_quartiles=Quartiles(seconds * 0.99, seconds * 1.02),
        rounds=60,
        host_seconds=2.1e-5,
        bytes=count,
        flops=flops,
        bandwidth_share=count / seconds / BANDWIDTH,
        roofline_share=least / seconds,
        bound="bandwidth" if count / BANDWIDTH > flops / PEAK else "products",
        peak_bytes=count * (1.2 - share / 2),
        kernels={"eager": 9, "torch": 3}.get(provider, 1),
        layouts={"transposed": ratio(1.4)},
        baseline="eager",
        over_baseline=ratio(share / PROVIDERS["eager"]),
    )


def sample_records() -> list[Record]:
    """Two devices; of the first three dates, the last with other versions; one incomplete."""
    older = {**VERSIONS, "torch": "2.10.0", "triton": "3.5.1"}
    records = []
    for date, scale in zip(DATES, (1.3, 1.12, 1.0), strict=True):
        versions = VERSIONS if date == DATES[-1] else older
        for group, size in (("small-bf16", 1.0), ("medium-bf16", 14.0), ("small-fp32", 3.1)):
            entries = steps(group, scale * size)
            records.append(record(group, entries, date=date, versions=versions))
    records.append(record("ops-bf16", ops()))
    records.append(record("small-tf32", steps("small-tf32")[:3], complete=False))
    records.append(record("small-bf16", steps("small-bf16", 0.6), device=SECOND))
    records.append(record("ops-bf16", ops(), device=SECOND, machine={}))
    return records


def sample_targets() -> list[Target]:
    """A bar of V3 that is met, one that is missed by little, one about an op, and a claim of a
    document about a device of which there is no record."""
    small: dict[str, Any] = {"kind": StepEntry, "who": "v3", "about": {"workload": ("small",)}}
    speed: dict[str, Any] = {**small, "metric": SPEED, "over": ("v1",), "direction": ">="}
    of_op = {**speed, "kind": OpEntry, "who": "triton", "over": ("eager",)}
    of_op["about"] = {"op": ("rope",), "passes": ("forward+backward",)}
    return [
        Target(**speed, bound=20.0),
        Target(**speed, bound=24.85, caveat="aim 30"),
        Target(**speed, bound=5.5, device=("MI325X",)),
        Target(**of_op, bound=1.0),
    ]
