"""A training run on disk: one safetensors file with a description, as JSON, in its header.

Tensors: ``model.<parameter>``, ``optimizer.exp_avg.<i>``, ``optimizer.exp_avg_sq.<i>`` (i in
the order of the parameters), ``optimizer.steps``, and ``random.cpu`` and ``random.device``,
the states of torch's generators. The place in the data is the number of steps done
(`tinyllama.training.data`). Parameters have the same layout in every tier, so any tier loads
any tier's file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tinyllama.harness.machine.files import write_whole
from tinyllama.model.config import ConfigError, ModelConfig, TrainConfig
from tinyllama.training.step import TrainStep

_KEY = "tinyllama"
_VERSION = 1
_FIELDS: dict[str, type] = {
    "model": dict,
    "train": dict,
    "tier": str,
    "steps": int,
    "batches": dict,
    "scaler": dict,
    "interrupted": bool,
}


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
        """Copy parameters, optimizer and scaler into a step.

        Raises ConfigError when the model has another shape, or a tensor is missing.
        """
        theirs, ours = asdict(self.model), asdict(step.model.config)
        for name in theirs.keys() - {"init_std"}:
            if theirs[name] != ours[name]:
                raise ConfigError(
                    f"checkpoint {str(self.path)!r} has {name} {theirs[name]}, "
                    f"the model {ours[name]}: remove the model's options or match them"
                )
        state = _state(step)
        for name, tensor in state.items():
            if name not in self.tensors or self.tensors[name].shape != tensor.shape:
                shape = tuple(tensor.shape)
                raise _damaged(self.path, f"it has no tensor {name} of shape {shape}")
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(self.tensors[name])
        if self.scaler and step.scaler.is_enabled():
            step.scaler.load_state_dict(self.scaler)

    def restore_random(self, device: torch.device) -> None:
        """Restore the states of the random generators: the CPU's, and the GPU's if it has one."""
        torch.set_rng_state(self.tensors["random.cpu"])
        if device.type != "cpu" and "random.device" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["random.device"], device)


def save(
    path: Path, step: TrainStep, steps: int, batches: dict[str, Any], *, interrupted: bool = False
) -> None:
    """Write the whole state of a run after ``steps`` steps, or nothing. Raises NotWrittenError."""
    description = {
        "version": _VERSION,
        "model": asdict(step.model.config),
        "train": asdict(step.config),
        "tier": step.model.tier.name,
        "steps": steps,
        "batches": batches,
        "scaler": step.scaler.state_dict(),
        "interrupted": interrupted,
    }
    tensors = {**_state(step), "random.cpu": torch.get_rng_state()}
    if step.device.type != "cpu":
        tensors["random.device"] = torch.cuda.get_rng_state(step.device)
    # Copies, since parameters share memory, which the format does not allow.
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def write(part: Path) -> None:
        try:
            save_file(copies, part, {_KEY: json.dumps(description)})
        except SafetensorError as error:  # of a full disk too, where Python raises OSError
            raise OSError(str(error)) from error

    write_whole(path, write)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises ConfigError when the file is missing, damaged, or no checkpoint of this program.
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
    try:
        description = json.loads(header)
        version = description["version"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(path, f"its description cannot be read, {error!r}") from error
    if version != _VERSION:
        raise ConfigError(
            f"checkpoint {str(path)!r} has format {version}, this program reads "
            f"{_VERSION}: use the program that wrote it"
        )
    try:
        _check(description, tensors)
        model, train = ModelConfig(**description["model"]), TrainConfig(**description["train"])
    except (ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    rest = {name: description[name] for name in _FIELDS if name not in ("model", "train")}
    return Checkpoint(path, model, train, **rest, tensors=tensors)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {str(path)!r} is damaged ({why}): name a whole file that --save wrote"
    )


def _check(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError, naming the field, unless a run can continue from these."""
    for name, kind in _FIELDS.items():
        if type(description.get(name)) is not kind:
            raise ValueError(
                f"{name} is {description.get(name)!r:.80}, not of type {kind.__name__}"
            )
    if description["steps"] < 0:
        raise ValueError(f"steps is {description['steps']}, not a number of steps")
    batches = description["batches"]
    if "kind" not in batches or (batches["kind"] == "text" and "bytes" not in batches):
        raise ValueError(f"batches is {batches!r:.80}, no description of data")
    random, now = tensors.get("random.cpu"), torch.get_rng_state()
    if random is None or (random.shape, random.dtype) != (now.shape, now.dtype):
        raise ValueError("random.cpu is no state of torch's generator")


def _state(step: TrainStep) -> dict[str, torch.Tensor]:
    """The tensors of a step by the names they have in a file."""
    parameters = {f"model.{name}": p for name, p in step.model.named_parameters()}
    optimizer = {f"optimizer.{name}": t for name, t in step.optimizer.tensors().items()}
    return {**parameters, **optimizer}
