"""The operations of a training step, counted in ways that do not share code."""

import importlib.util
import inspect
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.model.config import ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS
from tinyllama.profiling.workload import Workload

FORMULA = "model formula"


def count(workload: Workload) -> dict[str, Any]:
    """FLOP of one step, by way of counting; where a way cannot count, the reason."""
    samples, length = workload.train.samples_per_step, workload.train.seq_len
    found: dict[str, Any] = {
        FORMULA: workload.model.step_flops(samples, length),
        "declarations of the ops": sum(declared(workload.model, samples, length).values()),
        "PyTorch's counter": by_torch(workload.model, samples, length),
    }
    found["DeepSpeed"] = by_deepspeed(workload.model, samples, length)
    return {
        "flop": {name: value for name, value in found.items() if not isinstance(value, str)},
        "unavailable": {name: value for name, value in found.items() if isinstance(value, str)},
        "by_op": declared(workload.model, samples, length),
    }


def declared(model: ModelConfig, samples: int, length: int) -> dict[str, float]:
    """FLOP of each op of a step, forward and backward, from the ops' declarations."""
    of: dict[str, Any] = model.dims(samples, length)
    of["P"] = [model.parameters]  # a list of tensors; one of them stands for all
    calls = {**dict.fromkeys(PARTS, model.num_layers), "linear_cross_entropy": 1, "adamw": 1}
    calls["rms_norm"] += 1  # the last one
    found = {name: times * sum(_costs(name, of)) for name, times in calls.items()}
    for name, inner in (("output projection", "Q"), ("down projection", "F")):
        product = {"N": of["N"], "D": of[inner], "F": of["D"]}
        found[name] = model.num_layers * sum(_costs("linear", product))
    return found


def _costs(op: str, of: dict[str, Any]) -> list[float]:
    """FLOP of an op's forward pass, and of its backward pass."""
    return [
        cost(**{name: of[name] for name in inspect.signature(cost).parameters})
        for cost in OPS[op].flops.values()
    ]


def by_torch(model: ModelConfig, samples: int, length: int) -> float:
    """PyTorch's count of V1's products, forward and backward, on tensors without memory. Attention
    is counted whole, without its causal half."""
    made = TinyLlama(model, "v1").to("meta")
    tokens = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        made.loss(tokens, tokens).backward()
    return float(counter.get_total_flops())


def by_deepspeed(model: ModelConfig, samples: int, length: int) -> float | str:
    """DeepSpeed's count of V1's forward pass, times three: it counts no backward pass."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install deepspeed"
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    made = TinyLlama(model, "v1")
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    profiler = FlopsProfiler(made)
    profiler.start_profile()
    made(tokens)
    forward = float(profiler.get_total_flops())
    profiler.end_profile()
    return 3 * forward
