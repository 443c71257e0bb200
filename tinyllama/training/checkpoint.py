"""A training run on disk: one safetensors file with a manifest, as JSON, in its header.

Tensors: ``model.<parameter>``, ``optimizer.exp_avg.<i>``, ``optimizer.exp_avg_sq.<i>`` (i in
the order of the parameters) and ``optimizer.steps``. The position in the data is the number of
steps done (`tinyllama.training.data`), and no op draws random numbers. Parameters have the same
layout in every tier, so any tier loads any tier's file.

The manifest ends with the SHA-256 of all the rest: of the manifest itself, its version included,
and of every tensor. So a changed byte is a refused file, wherever it is.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tinyllama.harness.machine.files import NotWrittenError, write_whole
from tinyllama.harness.machine.parsed import json_of
from tinyllama.model.config import ConfigError, ModelConfig, TrainConfig
from tinyllama.training.shards import full_tensor, part
from tinyllama.training.step import TrainStep

_KEY = "tinyllama"
_VERSION = 2


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

        Raises ConfigError when the model has another shape.
        """
        theirs, ours = asdict(self.model), asdict(step.model.config)
        for name in theirs.keys() - {"init_std"}:
            if theirs[name] != ours[name]:
                raise ConfigError(
                    f"checkpoint {str(self.path)!r} has {name} {theirs[name]}, "
                    f"the model {ours[name]}: remove the model's options or match them"
                )
        with torch.no_grad():
            for name, (tensor, parameter) in _state(step).items():
                tensor.copy_(part(self.tensors[name], parameter))
        if self.scaler and step.scaler.is_enabled():
            step.scaler.load_state_dict(self.scaler)


def save(
    path: Path, step: TrainStep, steps: int, batches: dict[str, Any], *, interrupted: bool = False
) -> None:
    """Write the state of a run after ``steps`` steps, or nothing. All ranks must call it, and
    rank 0 writes; the file is the same for any number of ranks.

    Raises NotWrittenError, also for a state with a value that is not finite, from which no run
    could continue.
    """
    # Copies, since parameters share memory, which the format does not allow.
    tensors: dict[str, torch.Tensor] = {}
    for name, (tensor, parameter) in _state(step).items():
        gathered = full_tensor(tensor.detach(), parameter)
        if step.ranks.first:
            tensors[name] = gathered.to("cpu", copy=True)
    if not step.ranks.first:
        return
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise NotWrittenError(
                f"{str(path)!r} is not written, and what was there before is unchanged: {name} has "
                "a value that is not finite: train with a smaller learning rate"
            )
    manifest = {
        "version": _VERSION,
        "model": asdict(step.model.config),
        "train": asdict(step.config),
        "tier": step.model.tier.name,
        "steps": steps,
        "batches": batches,
        "scaler": step.scaler.state_dict(),
        "interrupted": interrupted,
    }
    manifest["sha256"] = _digest(manifest, tensors)

    def write(place: Path) -> None:
        try:
            save_file(tensors, place, {_KEY: json.dumps(manifest)})
        except SafetensorError as error:  # of a full disk too, where Python raises OSError
            raise OSError(str(error)) from error

    write_whole(path, write)


def saved_bytes(model: ModelConfig) -> int:
    """About how many bytes `save` writes: parameters, both moments, and 64 KiB for the rest."""
    return 12 * model.parameters + 2**16


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises ConfigError when the file is missing, damaged, or no checkpoint of this program.
    """
    named = f"checkpoint {str(path)!r}"
    if not path.is_file():
        why = "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"{named} {why}: name a file that --save wrote")
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header is None:
            raise ConfigError(
                f"{named} is a safetensors file of another program: name a file that --save wrote"
            )
        manifest: dict[str, Any] = json_of(header)
        if (version := manifest.pop("version")) != _VERSION:
            raise ConfigError(
                f"{named} has format {version!r:.80}, this program reads {_VERSION}: use the "
                "program that wrote it"
            )
        if manifest.pop("sha256") != _digest({"version": version, **manifest}, tensors):
            raise ValueError("its content differs from its checksum")
        model, train = ModelConfig(**manifest.pop("model")), TrainConfig(**manifest.pop("train"))
        return Checkpoint(path, model, train, tensors=tensors, **manifest)
    except ConfigError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError, TypeError,
            AttributeError) as error:  # fmt: skip
        raise ConfigError(
            f"{named} is damaged ({str(error)[:200]}): name a whole file that --save wrote"
        ) from error


def _digest(manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """The SHA-256 of a manifest and of tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _state(step: TrainStep) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """The tensors of a step by their names in a file, each with the parameter that it belongs to.
    It has that parameter's shape, and is split over the ranks in the same way."""
    named = list(step.model.named_parameters())
    state: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
        f"model.{name}": (mine, parameter)
        for (name, parameter), mine in zip(named, step.optimizer.parameters, strict=True)
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        for i, moment in enumerate(getattr(step.optimizer, kind)):
            state[f"optimizer.{kind}.{i}"] = (moment, named[i][1])
    return {**state, "optimizer.steps": (step.optimizer.steps, None)}
