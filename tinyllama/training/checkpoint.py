"""A training run on disk: one safetensors file with a description, as JSON, in its header.

Tensors: ``model.<parameter>``, ``optimizer.exp_avg.<i>``, ``optimizer.exp_avg_sq.<i>`` (i in
the order of the parameters), ``optimizer.steps``, and ``random.cpu`` and ``random.device``,
the states of torch's generators. The position in the data is the number of steps done
(`tinyllama.training.data`). Parameters have the same layout in every tier, so any tier loads
any tier's file.

The description holds the SHA-256 of all the rest: of the description without it, and of every
tensor. Files of version 1 have none.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tinyllama.harness.machine.device import memory_bytes
from tinyllama.harness.machine.files import NotWrittenError, write_whole
from tinyllama.harness.machine.parsed import json_of
from tinyllama.model.config import ConfigError, ModelConfig, TrainConfig
from tinyllama.training.shards import part, whole
from tinyllama.training.step import TrainStep

_KEY = "tinyllama"
_VERSION = 2
_SCALER = torch.amp.GradScaler("cpu").state_dict().keys()
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
    gradient scaler, empty for other precisions. interrupted: Ctrl-C ended the run. checksummed:
    the checksum shows that the file is as it was written; a file of version 1 has none.
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
    checksummed: bool

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
        for name, (tensor, parameter) in state.items():
            shape = tensor.shape if parameter is None else parameter.shape
            if name not in self.tensors or self.tensors[name].shape != shape:
                raise _damaged(self.path, f"it has no tensor {name} of shape {tuple(shape)}")
        with torch.no_grad():
            for name, (tensor, parameter) in state.items():
                tensor.copy_(part(self.tensors[name], parameter))
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
    """Write the whole state of a run after ``steps`` steps, or nothing. All ranks must call it, and
    rank 0 writes; the file is the same for any number of ranks.

    Raises NotWrittenError, also for a state from which no run could continue.
    """
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
    # Copies, since parameters share memory, which the format does not allow.
    copies: dict[str, torch.Tensor] = {}
    for name, (tensor, parameter) in _state(step).items():
        gathered = whole(tensor.detach(), parameter)
        if step.ranks.first:
            copies[name] = gathered.to("cpu", copy=True)
    if not step.ranks.first:
        return
    copies["random.cpu"] = torch.get_rng_state()
    if step.device.type != "cpu":
        copies["random.device"] = torch.cuda.get_rng_state(step.device).cpu()
    try:
        _check_tensors(copies)
    except ValueError as error:
        raise NotWrittenError(
            f"{str(path)!r} is not written, and what was there before is unchanged: {error}: train "
            "with a smaller learning rate"
        ) from error
    description["sha256"] = _digest(description, copies)

    def write(part: Path) -> None:
        try:
            save_file(copies, part, {_KEY: json.dumps(description)})
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
    if not path.is_file():
        why = "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"checkpoint {str(path)!r} {why}: name a file that --save wrote")
    if (size := path.stat().st_size) > memory_bytes(torch.device("cpu")):
        raise ConfigError(
            f"checkpoint {str(path)!r} has {size} bytes, more than the memory of this machine"
        )
    try:
        with safe_open(path, "pt") as file:
            description = _description(path, (file.metadata() or {}).get(_KEY))
            try:
                _check(description)
                model = ModelConfig(**description["model"])
                train = TrainConfig(**description["train"])
                _check_sizes(file, model)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                _check_digest(description, tensors)
                _check_tensors(tensors)
            except (ValueError, TypeError) as error:
                raise _damaged(path, str(error)) from error
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"checkpoint {str(path)!r} is not a readable safetensors file ({error}): "
            "name a file that --save wrote"
        ) from error
    rest = {name: description[name] for name in _FIELDS if name not in ("model", "train")}
    checksummed = "sha256" in description
    return Checkpoint(path, model, train, **rest, tensors=tensors, checksummed=checksummed)


def _description(path: Path, header: str | None) -> dict[str, Any]:
    """The description in a file's header, of a version that this program reads."""
    if header is None:
        raise ConfigError(
            f"checkpoint {str(path)!r} is a safetensors file of another program: "
            "name a file that --save wrote"
        )
    try:
        description: dict[str, Any] = json_of(header)
        version = description["version"]
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, f"its description cannot be read, {error!r}") from error
    if version not in (1, _VERSION):
        raise ConfigError(
            f"checkpoint {str(path)!r} has format {version!r:.80}, this program reads 1 and "
            f"{_VERSION}: use the program that wrote it"
        )
    return description


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {str(path)!r} is damaged ({why}): name a whole file that --save wrote"
    )


def _check(description: dict[str, Any]) -> None:
    """Raise ValueError, naming the field, unless a run can continue from these."""
    fields = {**_FIELDS, "version": int, **({"sha256": str} if description["version"] > 1 else {})}
    if wrong := sorted(description.keys() ^ fields.keys()):
        raise ValueError(f"fields missing or unknown: {', '.join(wrong):.80}")
    for name, kind in fields.items():
        if type(description[name]) is not kind:
            raise ValueError(f"{name} is {description[name]!r:.80}, not of type {kind.__name__}")
    if description["steps"] < 0:
        raise ValueError(f"steps is {description['steps']!r:.80}, not a number of steps")
    batches, scaler = description["batches"], description["scaler"]
    if "kind" not in batches or (batches["kind"] == "text" and "bytes" not in batches):
        raise ValueError(f"batches is {batches!r:.80}, no description of data")
    if scaler and not (
        scaler.keys() == _SCALER
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in scaler.values())
        and scaler["scale"] > 0
    ):
        raise ValueError(f"scaler is {scaler!r:.160}, no state of a gradient scaler")


def _check_sizes(file: Any, model: ModelConfig) -> None:
    """Raise ValueError, before any tensor is read, if the file has more than the model."""
    counts = {"model": 0, "optimizer": 0}
    for name in file.keys():  # noqa: SIM118
        kind, part = name.partition(".")[0], file.get_slice(name)
        if kind in counts:
            counts[kind] += math.prod(part.get_shape())
            if part.get_dtype() != "F32":
                raise ValueError(f"{name} is of type {part.get_dtype()}, not F32")
        elif name not in ("random.cpu", "random.device"):
            raise ValueError(f"it has an unknown tensor {name:.80}")
    expected = {"model": model.parameters, "optimizer": 2 * model.parameters + 1}
    if any(counts[kind] > expected[kind] for kind in counts):
        raise ValueError(f"it has {counts} elements, and its model takes {expected}")


def _check_digest(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    described = {name: value for name, value in description.items() if name != "sha256"}
    if "sha256" in description and description["sha256"] != _digest(described, tensors):
        raise ValueError("its content differs from its checksum")


def _check_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError, naming the tensor, for a value that no run can produce."""
    for name, tensor in tensors.items():
        if name.startswith("random."):
            continue
        if not tensor.isfinite().all():
            raise ValueError(f"{name} has a value that is not finite")
        if not name.startswith(("model.", "optimizer.exp_avg.")) and (tensor < 0).any():
            raise ValueError(f"{name} has a negative value")
    try:
        torch.Generator().set_state(tensors["random.cpu"])
    except (LookupError, RuntimeError, TypeError) as error:
        raise ValueError("random.cpu is no state of torch's generator") from error


def _digest(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """The SHA-256 of a description and of tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
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
