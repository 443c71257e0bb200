"""The bytes and operations of a training step, by its ops' declarations and by other counters."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.harness.kernels.precision import DTYPE_OF
from tinyllama.model.config import ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS
from tinyllama.profiling.workload import Workload

FORMULA = "model formula"
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
    dims: dict[str, Any] = model.dims(train.samples_per_step, train.seq_len)
    dims["P"] = [model.parameters]  # a list of tensors, of which one stands for all
    precision = {"tf32": "fp32"}.get(train.precision, train.precision)
    size = DTYPE_OF[precision].itemsize
    by_op: dict[str, Cost] = {}

    def add(name: str, op: str, times: int = 1, size: int = size, **others: int) -> None:
        declared = OPS[op]
        needed = {n: d for n, d in {**dims, **others}.items() if n in declared.cases[0].dims}
        for direction, suffix in (("forward", ""), ("backward", BACKWARD)):
            moved, done = declared.bytes.get(direction), declared.flops.get(direction)
            if moved or done:
                cost = Cost(
                    times * float(moved(size, **needed)) if moved else 0.0,
                    times * float(done(**needed)) if done else 0.0,
                )
                by_op[name + suffix] = by_op.get(name + suffix, Cost()) + cost

    layers = model.num_layers
    table = workload.chosen_tier().table
    if "stack" in table:
        add("stack", "stack")
    elif "block" in table:
        add("block", "block", layers)
    else:
        for part in PARTS:
            add(part, part, layers)
        add("block", "linear", layers, D=dims["Q"], F=dims["D"])  # the output projection
        add("block", "linear", layers, D=dims["F"], F=dims["D"])  # the down projection
    add("embedding", "embedding", size=4)
    add("final_norm", "rms_norm")
    add("loss", "linear_cross_entropy")
    add("adamw", "adamw", size=4)
    return by_op


def count(workload: Workload) -> dict[str, dict[str, float]]:
    """FLOP of one step of tier v1, by three ways of counting that share no code, and by op."""
    samples, length = workload.train.samples_per_step, workload.train.seq_len
    plain = replace(workload, tier="v1", without=[], memory="fast", plan=None)
    by_op = {name: cost.flops for name, cost in costs(plain).items() if cost.flops}
    counts = {
        FORMULA: float(workload.model.step_flops(samples, length)),
        "declarations of the ops": sum(by_op.values()),
        "PyTorch's counter": by_torch(workload.model, samples, length),
    }
    return {"flop": counts, "by_op": by_op}


def by_torch(model: ModelConfig, samples: int, length: int) -> float:
    """PyTorch's count of V1's products, forward and backward, on tensors without memory. Attention
    is counted whole, without its causal half."""
    llama = TinyLlama(model, "v1").to("meta")
    tokens = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        llama.loss(tokens, tokens).backward()
    return float(counter.get_total_flops())
