"""Short training runs of a small model, for the specifications of training."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, Tier
from tinyllama.training import checkpoint
from tinyllama.training.result import Result
from tinyllama.training.train import train

MODEL = ModelConfig(
    hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=128
)
CONFIG = TrainConfig(batch_size=2, seq_len=8, num_steps=4, learning_rate=1e-2)
ON_CPU = [name for name, tier in TIERS.items() if not tier.interpreted]  # as fast as runs need
PARAMETERS = [name for name, _ in TinyLlama(MODEL).named_parameters()]


def run(tier: str | Tier = "v1", *, device: str | torch.device = "cpu", **settings: Any) -> Result:
    """Train `MODEL` as `CONFIG` says; ``settings`` override its fields, or are `train`'s."""
    names = {field.name for field in fields(CONFIG)}
    config = replace(CONFIG, **{name: v for name, v in settings.items() if name in names})
    options = {name: v for name, v in settings.items() if name not in names}
    return train(MODEL, config, tier, device=device, **options)


def saved(
    path: Path, steps: int, tier: str | Tier = "v1", **settings: Any
) -> checkpoint.Checkpoint:
    """The checkpoint of a run of so many steps."""
    run(tier, num_steps=steps, save_to=path, **settings)
    return checkpoint.load(path)


def description(path: Path) -> dict[str, Any]:
    """What the header of a checkpoint says."""
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["tinyllama"]))
