"""The bandwidth and the rate of operations that each op of a step reached, beside the ceilings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.model.tiers import resolve
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS
from tinyllama.profiling.workload import Workload

BACKWARD = " backward"  # after the name of an op


@dataclass(frozen=True)
class Cost:
    """The fewest bytes that an op must move in a step, and the operations that it must do."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def costs(workload: Workload) -> dict[str, Cost]:
    """What the ops of a step cost by their declarations, by the names that profiles show: ``rope``,
    ``rope backward``. Under autocast elements count as 16 bits, but for the optimizer's."""
    model, train = workload.model, workload.train
    of: dict[str, Any] = model.dims(train.samples_per_step, train.seq_len)
    of["P"] = [model.parameters]  # a list of tensors; one of them stands for all
    precision = {"tf32": "fp32"}.get(train.precision, train.precision)
    size = DTYPE_OF[precision].itemsize
    found: dict[str, Cost] = {}

    def add(shown: str, op: str, times: int = 1, size: int = size, **others: int) -> None:
        declared = OPS[op]
        dims = {n: d for n, d in {**of, **others}.items() if n in declared.cases[0].dims}
        for passes in ("forward", "backward"):
            moved, done = declared.bytes.get(passes), declared.flops.get(passes)
            cost = Cost(
                times * float(moved(size, **dims)) if moved else 0.0,
                times * float(done(**dims)) if done else 0.0,
            )
            name = shown + (BACKWARD if passes == "backward" else "")
            if moved or done:
                found[name] = found.get(name, Cost()) + cost

    layers = model.num_layers
    table = resolve(workload.tier).without(*workload.without).table
    if "stack" in table:
        add("stack", "stack")
    elif "block" in table:
        add("block", "block", layers)
    else:
        for part in PARTS:
            add(part, part, layers)
        add("block", "linear", layers, D=of["Q"], F=of["D"])  # the output projection
        add("block", "linear", layers, D=of["F"], F=of["D"])  # the down projection
    add("embedding", "embedding", size=4)
    add("final_norm", "rms_norm")
    add("loss", "linear_cross_entropy")
    add("adamw", "adamw", size=4)
    return found


def table(
    made: Callable[..., Table],
    seconds: Mapping[str, float],
    cost: Mapping[str, Cost],
    ceilings: Mapping[str, float],
) -> Table:
    """Each op with its rates, and their shares of the measured ceilings. made: makes a table of
    columns; seconds: by the names of `costs`."""
    copy, product = ceilings["bytes_per_second"], ceilings["flops_per_second"]
    rows = made("op", "us", "GB/s", "of a copy", "GFLOP/s", "of a product")
    for name, took in sorted(seconds.items(), key=lambda item: -item[1]):
        if name in cost and took:
            moved, done = cost[name].bytes / took, cost[name].flops / took
            by_bytes = f"{moved * 1e-9:.1f}", f"{moved / copy:.0%}"
            by_flops = f"{done * 1e-9:.1f}", f"{done / product:.0%}"
            rows.add_row(name, f"{took * 1e6:.1f}", *by_bytes, *by_flops)
    return rows
