"""What the documents claim of an ultra-fused step, computed for ours: the table of docs/design.md.

    python -m tools.claims_table    compile the kernels of V3's and V4's blocks, and write
                                    results/occupancy.json

Counts, times and energy come from the newest record of each device.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.kernels.resources import compilation
from tinyllama.harness.machine.files import write_json
from tinyllama.harness.records.entries import CeilingEntry, StepEntry
from tinyllama.harness.records.results import Record, current_commit, now, versions
from tinyllama.model.config import WORKLOADS
from tinyllama.ops import OPS
from tools import model_tables
from tools.result_tables import ROOT, newest

RECORD = ROOT / "results/occupancy.json"
CHIPS = ("gfx942", "sm_90")
GROUP = "small-bf16"
BLOCKS = {"v3": ("block", "triton"), "v4": ("stack", "fused"), "v4-single": ("stack", "single")}
# What a step must do: its ops, and the bytes of an element of theirs.
STEP = {"embedding": 2, "stack": 2, "rms_norm": 2, "linear_cross_entropy": 2, "adamw": 4}


def shares(tier: str, chip: str) -> Iterator[float]:
    """Of each launch of a tier's blocks, forward and backward: the warps that a unit holds of the
    most that it can hold."""
    op, provider = (OPS[BLOCKS[tier][0]], BLOCKS[tier][1])
    case, by_kernel = op.timed[-1], dict[str, float]()
    for launch in launches_of(op, op.providers[provider], case, torch.bfloat16, chip=chip):
        compiled = compilation(launch, chip)
        if compiled.key not in by_kernel:
            warps = compiled.run().occupancy
            assert warps is not None, f"{chip} has units of its own: add them"
            by_kernel[compiled.key] = warps.warps / warps.most
        yield by_kernel[compiled.key]


def record() -> None:
    """Write the mean share of each tier on each chip."""
    means = {
        tier: {chip: statistics.fmean(shares(tier, chip)) for chip in CHIPS} for tier in BLOCKS
    }
    stated = {"versions": versions(), "commit": current_commit(), "date": now()}
    write_json(RECORD, {**stated, "occupancy": means})


def least_bytes() -> float:
    """The bytes that a step of the workload moves at least, by the ops' declarations."""
    of = model_tables.sizes(WORKLOADS[GROUP.partition("-")[0]])
    return sum(
        model_tables.cost(OPS[name], "bytes", which, of, size)
        for name, size in STEP.items()
        for which in OPS[name].bytes
    )


def table() -> str:
    """For each device with a record of the group."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    made = [
        _of_device(record, recorded["occupancy"])
        for records in newest(StepEntry)
        for record in records
        if record.group == GROUP
    ]
    of = recorded["versions"]
    return "\n\n".join(
        [
            *made,
            f"Occupancy: compiled by triton {of['triton']}, commit {recorded['commit'][:10]}, "
            f"{recorded['date'][:10]}.",
        ]
    )


def _of_device(record: Record, held: Mapping[str, Any]) -> str:
    steps = {entry.contender: entry for entry in record.of(StepEntry)}
    v1, v3, v4, single = (steps[name] for name in ("v1", *BLOCKS))

    def less(new: StepEntry, old: StepEntry, field: str) -> str:
        return _percent(getattr(new, field) / getattr(old, field))

    def each(old: StepEntry, field: str) -> str:
        return f"{less(v4, old, field)}; `single` {less(single, old, field)}"

    def rate(entry: StepEntry) -> float:
        assert entry.seconds
        return least_bytes() / entry.seconds

    copied = next(e.bytes_per_second for e in record.of(CeilingEntry) if e.bytes_per_second)
    fuller = "; ".join(f"{chip} {_percent(held['v4'][chip] / held['v3'][chip])}" for chip in CHIPS)
    means = "; ".join(f"{chip} {held['v3'][chip]:.0%} and {held['v4'][chip]:.0%}" for chip in CHIPS)
    rows = [
        ["kernels", "-95%", each(v1, "kernels"), each(v3, "kernels"), "launches of a step"],
        [
            "memory bandwidth",
            "+45%",
            _percent(rate(v4) / rate(v1)),
            _percent(rate(v4) / rate(v3)),
            f"the {least_bytes() / 2**20:.0f} MiB that any such step moves at least, over its "
            f"time: {rate(v4) / 1e12:.2f} TB/s, where a copy has {copied / 1e12:.2f}. The bytes "
            "are the same for each tier, so this is the ratio of speeds",
        ],
        [
            "occupancy",
            "+78%",
            "V1's kernels are the vendor's",
            fuller,
            f"warps that a unit holds, of the most that it can: the mean over our launches of the "
            f"blocks, V3 and V4: {means}",
        ],
        [
            "energy of a sample",
            "-32%",
            each(v1, "joules_per_sample"),
            each(v3, "joules_per_sample"),
            "see Energy below",
        ],
    ]
    text = model_tables.table(["", "claimed", "V4 over V1", "V4 over V3", "what it is here"], rows)
    return (
        f"{text}\n\n{record.group}: {record.device}, commit {record.short_commit}, "
        f"{record.date[:10]}."
    )


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.0%}"


if __name__ == "__main__":
    record()
