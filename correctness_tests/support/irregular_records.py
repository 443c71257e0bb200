"""SYNTHETIC records in which each element matters, the last of each list among them; for texts that
are compared as a whole. Nothing in this file was measured."""

from dataclasses import replace
from typing import Any

from correctness_tests.support.sample_records import (
    DATES,
    FIRST,
    SECOND,
    VERSIONS,
    op_target,
    ops,
    ratio,
    record,
    sample_targets,
    step,
    steps,
    sweep,
    target,
)
from tinyllama.harness.records.entries import CeilingEntry, OpEntry, SweepEntry
from tinyllama.harness.records.results import Record

PASSES = ("forward", "forward+backward")
CERTIFICATE: dict[str, Any] = {
    "schema": 1,
    "device": FIRST,
    "date": "2026-03-01T10:00:00Z",
    "commits": ["0123456789abcdef", "fedcba9876543210"],
    "versions": VERSIONS,
    "blocks": 240,
    "merges": 12000,
    "bars": [
        {"text": "SYNTHETIC false alarms below 1%", "held": True, "measured": "0.3%"},
        {"text": "SYNTHETIC 2% slower is found", "held": False, "measured": "97%"},
    ],
    "found": [
        {
            "benchmark": "step/small-bf16/v3",
            "metric": "seconds",
            "spread": 0.0123,
            "detected": {"0.01": 0.5, "0.02": 0.991},
            "smallest": 0.018,
        },
        {
            "benchmark": "step/small-bf16/v1",
            "metric": "seconds",
            "spread": 0.2,
            "detected": {"0.01": 0.02, "0.02": 0.04},
            "smallest": None,
        },
    ],
}


def records() -> list[Record]:
    """What comes last of each list matters: a list that is cut short shows."""
    older = {**VERSIONS, "torch": "2.10.0"}
    found = []
    for date, scale in zip(DATES, (1.3, 0.7, 1.0), strict=True):
        share = ratio(0.62 / 0.97 / scale) if scale != 1 else ratio(0.6)
        contenders = ("floor", "v1", "v3", "hf-eager", *(("v2",) if date == DATES[-1] else ()))
        entries = [step("small-bf16", name, scale) for name in contenders]
        entries = [replace(e, floor_share=share) if e.who == "v3" else e for e in entries]
        entries += steps("small-bf16")[-1:]  # which cannot run
        found.append(record("small-bf16", entries, date=date, versions=older))
    found[0].entries.append(step("small-bf16", "v1", name="old", unavailable={"watts": "is old"}))
    found[-1].versions = VERSIONS
    for hour in ("09", "15"):
        few = [
            step("small-fp32", "v2", 3.1, seconds_quartiles=None, rounds=None),
            step("small-fp32", "floor", 3.1),
            step("small-fp32", "v1", 3.1, time_by=None, gradients=73, unavailable={"mfu": hour}),
        ]
        found.append(record("small-fp32", few, date=f"2026-03-02T{hour}:30:00Z"))
    beside = {"products": 2e-3, "an unknown kind": 1e-3}
    alone = [
        step("medium-bf16", "v3", time_by=beside, busy_seconds=None, last_loss=None),
        step("medium-bf16", "torchtitan", time_by={"products": 1.5 * 2.2e-3}),
    ]
    found.append(record("medium-bf16", alone, command="pytest perf_tests/steps"))
    first = step("large-bf16", "v1", 9.0, time_by=None, busy_seconds=None, floor_share=None)
    found.append(record("large-bf16", [first, step("large-bf16", "liger", 99.0, kernels=None)]))
    found.append(record("ops-bf16", _ops()))
    found.append(record("sweep-small-bf16", _sweep()))
    part = steps("small-tf32")[:3]
    found.append(record("small-tf32", part, date="2026-03-03T09:00:00Z", complete=False))
    machine = {"clocks_mhz": {"sm": 1000, "memory_max": 3000}, "cores": 4}
    found.append(record("ops-fp16", _few_ops(), device=SECOND, machine=machine))
    return found


def _ops() -> list[Any]:
    """The ceilings; two ops, one of them in two cases; one without a count of operations, and one
    that cannot run. The last of the forward pass is the nearest to the roofline, the last of the
    other the farthest."""
    found = [e for e in ops() if isinstance(e, OpEntry) and e.who != "torch"]
    large = [e for e in found if e.op == "rope" and ("B=8," in e.case or e.who == "triton")]
    large += [e for e in found if e.op == "swiglu" and "B=8," in e.case and e.who != "eager"]
    qkv = [e for e in found if e.op == "qkv" and (e.who, e.passes) == ("triton", "forward")]
    kept: list[Any] = [e for e in ops() if isinstance(e, CeilingEntry)]
    kept += [replace(e, flops=None, bytes=None, layouts=None) for e in qkv]
    near = sorted(large, key=lambda e: (e.role == "ours", e.roofline_share or 0))
    kept += [e for e in near if e.passes == "forward"]
    kept += [e for e in reversed(near) if e.passes != "forward"]
    last = next(e for e in found if e.op == "adamw")
    return [*kept, replace(last, cannot="SYNTHETIC: no such kernel", seconds=None)]


def _few_ops() -> list[Any]:
    """Eager is the best here, one kernel cannot run, and the only peer is the last."""
    product, copy = reversed([e for e in ops("fp16") if isinstance(e, CeilingEntry)])
    rope = {e.who: e for e in ops("fp16") if isinstance(e, OpEntry) and e.op == "rope"}
    eager = replace(rope["eager"], roofline_share=0.95)
    again = replace(
        eager, name="op/again", case="B=9", roofline_share=0.5
    )  # which moves as many bytes
    cannot = replace(rope["triton"], cannot="SYNTHETIC: no such kernel", seconds=None)
    peer = replace(rope["liger"], provider="liger, SYNTHETIC")
    both = (replace(rope["torch"], name=f"op/norm/{p}", op="norm", passes=p) for p in PASSES)
    return [product, copy, eager, again, rope["torch"], cannot, peer, *both]


def _sweep() -> list[SweepEntry]:
    """Lengths and batches of two tiers and a peer. The longest does not fit in one of the tiers,
    the largest batch was only tried by the peer, which ends at the shortest length but one."""
    lengths, batches = (128, 256, 4096, 8192), (1, 4)
    found = []
    for entry in sweep("small-bf16"):
        if entry.role == "tier" and entry.who != "v2":
            size = entry.seq_len if entry.axis == "seq_len" else entry.batch_size
            found += [entry] if size in (lengths if entry.axis == "seq_len" else batches) else []
    peer = {(e.batch_size, e.seq_len): e for e in sweep("small-bf16") if e.role == "peer"}
    return [*found, peer[8, 256], peer[1, 256], peer[64, 256]]


def targets() -> list[Any]:
    bar = op_target(metric="bandwidth_share", at_least=0.5, caveat="SYNTHETIC caveat")
    over = replace(bar, metric="speed", over=("torch", "liger"), caveat="")
    most: dict[str, Any] = {"at_least": None, "at_most": 9.0}
    kernels = replace(bar, metric="kernels", provider="eager", passes="forward+backward", **most)
    metrics = ("live_bytes", "held_bytes", "held_peak_bytes", "joules_per_sample", "mfu", "copies")
    bars = [target(metric, None, at_most=1.5) for metric in (*metrics, "gradient_share")]
    return [bar, over, kernels, *bars, *sample_targets()]
