"""Which parts of a tier's plan a step can run, and why the others cannot."""

from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import MEMORY, ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.ops.stack.configs import pays_beside
from tinyllama.training.ranks import Ranks
from tinyllama.training.shards import sharded

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def runnable(
    model: TinyLlama, config: TrainConfig, plan: StepPlan | None, ranks: Ranks
) -> tuple[StepPlan, dict[str, str]]:
    """The plan as far as it can run (None: the tier's), and the reason for each part left out.

    Raises ConfigError for a given plan that cannot run, and for incompatible settings.
    """
    device, tier, shard = model.embedding.device, model.tier, sharded(model)
    whole_plan = plan or tier.plan(device.type)
    if whole_plan.memory not in MEMORY:
        raise ConfigError(f"memory {whole_plan.memory!r} is unknown: use {', '.join(MEMORY)}")
    if whole_plan.memory == "small":
        _refuse_with_small_memory(config, ranks)
    ranks.part(config.batch_size)
    selective = tier.table.get("block") == "selective"
    if selective != (whole_plan.memory == "selective"):
        raise ConfigError(
            f"memory {whole_plan.memory!r} and the blocks of tier {tier.name} do not "
            "belong together: take the tier's own plan, from Tier.with_memory"
        )
    at_once = "a compiled backward pass gives all gradients at once"
    in_parts = "shards are gathered and freed between the layers"
    reasons = {
        "compile": cannot("compile", device) or (at_once if whole_plan.memory == "small" else None),
        "capture": cannot("capture", device)
        or (in_parts if shard else None)
        or _frozen_by_capture(model, config),
        "overlap": _final_at_the_end(model, config, whole_plan),
    }
    left_out: dict[str, str] = {}
    for way, reason in reasons.items():
        if reason and getattr(whole_plan, way):
            if plan is not None:
                raise ConfigError(f"{way} cannot run on {device.type}: {reason}")
            left_out[way] = reason
    if plan is None and whole_plan.overlap and "overlap" not in left_out and ranks.count == 1:
        rows = config.batch_size * config.seq_len
        dtype = AUTOCAST.get(config.precision)
        x_ND = model.embedding.detach()[:1].expand(rows, -1)
        dtype = dtype or x_ND.dtype
        if model.stacks(x_ND, dtype) and not pays_beside(x_ND, dtype):
            left_out["overlap"] = "with products of this size, one update at the end is faster"
    off: dict[str, Any] = dict.fromkeys(left_out, False)
    return replace(whole_plan, **off), left_out


def _refuse_with_small_memory(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ConfigError for a setting that needs all gradients at once: to compute their norm,
    to sum them over micro-batches, or to find one that is not finite before the update."""
    for setting, used, instead in (
        (f"max_grad_norm {config.max_grad_norm}", config.max_grad_norm is not None, "no limit"),
        (f"accumulate {config.accumulate}", config.accumulate > 1, "accumulate 1"),
        ("precision fp16", config.precision == "fp16", "precision bf16"),
        (f"the mean over {ranks.count} ranks", ranks.count > 1, "one rank"),
    ):
        if used:
            raise ConfigError(
                f"memory small never has all gradients at once, and {setting} needs them: "
                f"use memory fast, or {instead}"
            )


def _frozen_by_capture(model: TinyLlama, config: TrainConfig) -> str | None:
    """Why a graph would freeze a value that must change; None if the step may be captured."""
    if config.precision == "fp16":
        return "the fp16 gradient scaler reads the device in every step"
    if model.tier.counts_on_host:
        return "the optimizer of this tier counts its steps on the host"
    return None


def _final_at_the_end(model: TinyLlama, config: TrainConfig, plan: StepPlan) -> str | None:
    """Why no block can be updated before the backward pass ends; None if blocks can be."""
    table = model.tier.table
    if "stack" not in table or table["adamw"] != "triton":
        return "the blocks of this tier are not one op, or its optimizer takes all at once"
    reasons = {
        "clipped gradients wait for the norm of all": config.max_grad_norm is not None,
        "accumulated gradients wait for the last micro-batch": config.accumulate > 1,
        "fp16 waits for gradients that are not finite": config.precision == "fp16",
        f"memory {plan.memory} updates in an order of its own": plan.memory != "fast",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
