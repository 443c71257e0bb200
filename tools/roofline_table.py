"""The operations of each op for each byte, beside the quotient of the measured ceilings."""

from collections.abc import Mapping
from typing import Any

from tinyllama.harness import Op
from tinyllama.harness.records.entries import CeilingEntry
from tinyllama.model.config import WORKLOADS
from tools import model_tables
from tools.result_tables import newest

SHOWN = ("small", "medium")


def table() -> str:
    """For each device whose ceilings are recorded, and each op of the model."""
    return "\n\n".join(_of_device(records[-1]) for records in newest(CeilingEntry))


def _of_device(record: Any) -> str:
    rates = {e.name: e.bytes_per_second or e.flops_per_second for e in record.of(CeilingEntry)}
    copied, multiplied = rates["ceiling/copy"], rates["ceiling/product-bf16"]
    ridge = multiplied / copied
    headers = [
        "op",
        *(f"{name}: {what}" for name in SHOWN for what in ("FLOP/B", "share", "bound")),
    ]
    of = {name: model_tables.sizes(WORKLOADS[name]) for name in SHOWN}

    def row(op: Op) -> list[str]:
        cells = [f"`{op.name}`"]
        for name in SHOWN:
            intensity = _intensity(op, of[name])
            bound = "memory" if intensity < ridge else "products"
            cells += [f"{intensity:.1f}", f"{intensity / ridge:.0%}", bound]
        return cells

    text = model_tables.table(headers, map(row, model_tables.model_ops()))
    return (
        f"{text}\n\n{record.device}: a product {multiplied / 1e12:.0f} TFLOP/s, a copy "
        f"{copied / 1e12:.2f} TB/s, {ridge:.0f} FLOP/B (commit {record.short_commit}, "
        f"{record.date[:10]})."
    )


def _intensity(op: Op, of: Mapping[str, int]) -> float:
    size = min(dtype.itemsize for dtype in op.dtypes)
    moved, done = (
        sum(model_tables.cost(op, kind, which, of, size) for which in op.bytes)
        for kind in ("bytes", "flops")
    )
    return done / moved
