"""A training run on disk: one safetensors file, its description as JSON in the header.

Tensors: ``model.<parameter>``, ``optimizer.exp_avg.<i>``, ``optimizer.exp_avg_sq.<i>`` (i in
the order of the parameters), ``optimizer.steps``, and ``random.cpu`` and ``random.device``,
the states of torch's generators. The place in the data is the number of steps done (see
`tinyllama.data`). Parameters have one layout in every tier, so any tier loads any tier's file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tinyllama.config import ConfigError, ModelConfig, TrainConfig, as_dict
from tinyllama.files import write_whole
from tinyllama.step import TrainStep

_KEY = "tinyllama"
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A file that was read: the settings of the run that wrote it, and its tensors (CPU).

    steps: done so far. batches: `Batches.describe` of its data. scaler: the state of the fp16
    gradient scaler, empty for other precisions. interrupted: Ctrl-C ended the run.
    """

    path: Path
    model: ModelConfig
    train: TrainConfig
    tier: str
    steps: int
    batches: dict[str, Any]
    scaler: dict[str, Any]
    interrupted: bool
    tensors: dict[str, torch.Tensor]

    def restore(self, step: TrainStep) -> None:
        """Put parameters, optimizer and scaler into a step.

        Raises ConfigError when the model has another shape.
        """
        theirs, ours = as_dict(self.model), as_dict(step.model.config)
        for name in theirs.keys() - {"init_std"}:
            if theirs[name] != ours[name]:
                raise ConfigError(
                    f"checkpoint {str(self.path)!r} has {name} {theirs[name]}, "
                    f"the model {ours[name]}: leave the model's options away or match them"
                )
        with torch.no_grad():
            for name, tensor in _state(step).items():
                tensor.copy_(self.tensors[name])
        if self.scaler and step.scaler.is_enabled():
            step.scaler.load_state_dict(self.scaler)

    def restore_random(self, device: torch.device) -> None:
        """Put back the states of the random generators, the device's if it was of its kind."""
        torch.set_rng_state(self.tensors["random.cpu"])
        if device.type != "cpu" and "random.device" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["random.device"], device)


def save(
    path: Path, step: TrainStep, steps: int, batches: dict[str, Any], *, interrupted: bool = False
) -> None:
    """Write the whole state of a run after ``steps`` steps, or nothing at all."""
    description = {
        "version": _VERSION,
        "model": as_dict(step.model.config),
        "train": as_dict(step.config),
        "tier": step.model.tier.name,
        "steps": steps,
        "batches": batches,
        "scaler": step.scaler.state_dict(),
        "interrupted": interrupted,
    }
    tensors = {**_state(step), "random.cpu": torch.get_rng_state()}
    if step.device.type != "cpu":
        tensors["random.device"] = torch.cuda.get_rng_state(step.device)
    # Copies: parameters may share memory, which the format does not allow.
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    write_whole(path, lambda part: save_file(copies, part, {_KEY: json.dumps(description)}))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises ConfigError when the file is missing or is not a checkpoint of this program.
    """
    if not path.is_file():
        raise ConfigError(f"checkpoint {str(path)!r} does not exist: name a file that --save wrote")
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"checkpoint {str(path)!r} is not a readable safetensors file ({error}): "
            "name a file that --save wrote"
        ) from error
    if header is None:
        raise ConfigError(
            f"checkpoint {str(path)!r} is a safetensors file of another program: "
            "name a file that --save wrote"
        )
    description = json.loads(header)
    if description["version"] != _VERSION:
        raise ConfigError(
            f"checkpoint {str(path)!r} has format {description['version']}, this program reads "
            f"{_VERSION}: use the program that wrote it"
        )
    return Checkpoint(
        path,
        ModelConfig(**description["model"]),
        TrainConfig(**description["train"]),
        description["tier"],
        description["steps"],
        description["batches"],
        description["scaler"],
        description["interrupted"],
        tensors,
    )


def _state(step: TrainStep) -> dict[str, torch.Tensor]:
    """The tensors of a step by the names they have in a file."""
    parameters = {f"model.{name}": p for name, p in step.model.named_parameters()}
    optimizer = {f"optimizer.{name}": t for name, t in step.optimizer.tensors().items()}
    return {**parameters, **optimizer}
