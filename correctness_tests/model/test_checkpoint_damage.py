"""Files that are no checkpoint, or one no more: refused in one line that names file and fault."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from correctness_tests.support.commands import tinyllama
from correctness_tests.support.runs import CONFIG, MODEL, description
from tinyllama.harness.machine.device import memory_bytes
from tinyllama.harness.machine.files import NotWrittenError
from tinyllama.model.config import ConfigError
from tinyllama.model.llama import TinyLlama
from tinyllama.training import checkpoint
from tinyllama.training.step import TrainStep
from tinyllama.training.train import train

GOLDEN = Path(__file__).with_name("golden")
VERSIONS = ("version-1", "version-2")
# The names of version 1 and 2; the optimizer's tensors have the places of this list.
NAMES = [
    "embedding",
    "final_norm",
    *(
        f"layers.{layer}.{name}"
        for layer in (0, 1)
        for name in (
            "attention_norm",
            "w_q",
            "w_k",
            "w_v",
            "w_o",
            "mlp_norm",
            "w_gate",
            "w_up",
            "w_down",
        )
    ),
]
LOSSES = [2.3899402618408203, 2.4830424785614014, 2.3788299560546875]  # of steps 4 to 6


def golden(folder: Path) -> Path:
    """A copy of the newest file."""
    return Path(shutil.copy(GOLDEN / "version-2.safetensors", folder / "golden"))


# -- files of every version -------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_each_version_is_read_by_its_names(version: str, tmp_path: Path) -> None:
    """Names that `save` and `load` exchange alike would fit each other, and no file from before."""
    path = GOLDEN / f"{version}.safetensors"
    tensors, saved = load_file(path), checkpoint.load(path)
    step = TrainStep(TinyLlama(saved.model, seed=1), saved.train)
    saved.restore(step)
    parameters = dict(step.model.named_parameters())
    assert set(parameters) == set(NAMES)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, tensors[f"model.{name}"]), name
    for index, name in enumerate(NAMES):
        assert step.optimizer.parameters[index] is parameters[name]
        assert torch.equal(step.optimizer.exp_avg[index], tensors[f"optimizer.exp_avg.{index}"])
        moment = step.optimizer.exp_avg_sq[index]
        assert torch.equal(moment, tensors[f"optimizer.exp_avg_sq.{index}"])
    assert step.optimizer.steps == tensors["optimizer.steps"] == 3
    checkpoint.save(tmp_path / "again", step, saved.steps, saved.batches)
    again = load_file(tmp_path / "again")
    assert again.keys() == tensors.keys()
    for name in tensors.keys() - {"random.cpu"}:
        assert torch.equal(again[name], tensors[name]), name


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_each_version_continues_its_curve(version: str) -> None:
    stored = checkpoint.load(GOLDEN / f"{version}.safetensors")
    assert (stored.steps, stored.tier, stored.batches) == (3, "v1", {"kind": "random tokens"})
    assert stored.checksummed == (version != "version-1")
    resumed = train(stored.model, replace(stored.train, num_steps=3), device="cpu", resume=stored)
    assert resumed.losses == pytest.approx(LOSSES, rel=1e-5)


@pytest.mark.long
def test_a_file_without_a_checksum_is_said(tmp_path: Path) -> None:
    resume = ("train", "--device", "cpu", "--num-steps", "1", "--resume")
    old, new = (tinyllama(*resume, GOLDEN / f"version-{n}.safetensors") for n in (1, 2))
    assert (old.status, new.status) == (0, 0)
    assert "note: the checkpoint has no checksum" in old.err
    assert "note" not in new.err


def test_a_file_from_before_a_setting_existed_has_its_default(tmp_path: Path) -> None:
    path = golden(tmp_path)
    before, settings = checkpoint.load(path).train, description(path)["train"]
    del settings["accumulate"], settings["max_grad_norm"]
    redescribed(path, {"train": settings})
    assert checkpoint.load(path).train == before


# -- damage -----------------------------------------------------------------------------------


def redescribed(
    path: Path, change: Mapping[str, Any] = {}, tensors: Mapping[str, torch.Tensor | None] = {}
) -> None:
    """A file of version 1, without a checksum: its description has these fields, and its tensors
    other values, or (None) are not there."""
    changed = {**load_file(path), **tensors}
    left = {name: tensor for name, tensor in changed.items() if tensor is not None}
    described = {name: value for name, value in description(path).items() if name != "sha256"}
    described |= {"version": 1, **change}
    save_file(left, path, {"tinyllama": json.dumps(described)})


@pytest.mark.long
def test_no_byte_of_a_file_can_be_another(tmp_path: Path) -> None:
    """Some of the header, and fewer of the tensors."""
    path = golden(tmp_path)
    assert checkpoint.load(path).checksummed
    content, described, tensors = path.read_bytes(), description(path), load_file(path)
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(0, header, 9), *range(header, len(content), 301)]:
        changed = bytearray(content)
        changed[place] ^= 0xFF if place % 2 else 0x01
        path.write_bytes(changed)
        with suppress(ConfigError):
            loaded = checkpoint.load(path)
            assert description(path) == described, place  # JSON has several ways to say the same
            assert loaded.tensors.keys() == tensors.keys(), place
            assert all(torch.equal(loaded.tensors[name], t) for name, t in tensors.items()), place


def test_the_checksum_cannot_be_left_out(tmp_path: Path) -> None:
    path = golden(tmp_path)
    described = description(path)
    for name, value in (("version", 1), ("sha256", ""), ("sha256", "0" * 64), ("steps", 2)):
        changed = {**described, name: value}
        save_file(load_file(path), path, {"tinyllama": json.dumps(changed)})
        with pytest.raises(ConfigError, match="is damaged"):
            checkpoint.load(path)
    redescribed(path, {"version": 2})
    with pytest.raises(ConfigError, match=r"is damaged .fields missing or unknown: sha256"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.embedding", math.nan, "has a value that is not finite"),
        ("optimizer.exp_avg.0", -math.inf, "has a value that is not finite"),
        ("optimizer.exp_avg_sq.0", math.nan, "has a value that is not finite"),
        ("optimizer.exp_avg_sq.0", -1e-30, "has a negative value"),
        ("optimizer.steps", -1.0, "has a negative value"),
    ],
)
def test_a_value_that_no_run_has_is_named(
    tmp_path: Path, name: str, value: float, message: str
) -> None:
    path = golden(tmp_path)
    changed = load_file(path)[name].clone()
    changed.view(-1)[-1] = value
    redescribed(path, tensors={name: changed})
    with pytest.raises(ConfigError, match=f"is damaged .{re.escape(name)} {message}"):
        checkpoint.load(path)
    changed.view(-1)[-1] = 0.5
    redescribed(path, tensors={name: changed})
    checkpoint.load(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.embedding": torch.ones(11, 8, dtype=torch.int32)}, "is of type I32, not F32"),
        ({"model.more": torch.ones(1)}, "elements, and its model takes"),
        ({"more": torch.ones(1)}, "it has an unknown tensor more"),
        ({"random.cpu": torch.full((5056,), 255, dtype=torch.uint8)}, "random.cpu is no state"),
    ],
)
def test_tensors_that_no_run_has_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    path = golden(tmp_path)
    redescribed(path, tensors=tensors)
    with pytest.raises(ConfigError, match=message):
        checkpoint.load(path)


def test_what_cannot_fit_into_memory_is_not_read(tmp_path: Path) -> None:
    """A file may be sparse: terabytes that take no place on a disk."""
    path = golden(tmp_path)
    with path.open("r+b") as file:
        file.truncate(memory_bytes(torch.device("cpu")) + 1)
    with pytest.raises(ConfigError, match="bytes, more than the memory of this machine"):
        checkpoint.load(path)


def test_a_state_that_could_not_be_read_back_replaces_nothing(tmp_path: Path) -> None:
    path = golden(tmp_path)
    before = path.read_bytes()
    step = TrainStep(TinyLlama(MODEL), CONFIG)
    with torch.no_grad():
        step.model.final_norm[3] = math.nan
    with pytest.raises(NotWrittenError, match=r"model\.final_norm has a value that is not finite"):
        checkpoint.save(path, step, 1, {"kind": "random tokens"})
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "[" * 100_000])
def test_a_header_that_is_none_is_damaged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    save_file({"weight": torch.ones(2)}, path, {"tinyllama": text})
    with pytest.raises(ConfigError, match=r"is damaged .*: name a whole file that --save wrote"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model is None, not of type dict"),
        ({"model": {"hidden_dim": -8}}, "hidden_dim is -8: use a whole number"),
        ({"train": {"speed": 3}}, "unexpected keyword argument 'speed'"),
        ({"steps": "2"}, "steps is '2', not of type int"),
        ({"steps": -1}, "steps is -1, not a number of steps"),
        ({"batches": {}}, "batches is {}, no description of data"),
        ({"batches": {"kind": "text"}}, "batches is {'kind': 'text'}, no description of data"),
        ({"scaler": None}, "scaler is None, not of type dict"),
        (
            {"scaler": {"scale": math.nan}},
            "scaler is {'scale': nan}, no state of a gradient scaler",
        ),
        ({"sha256": "0"}, "fields missing or unknown: sha256"),
        ({"tier": 1}, "tier is 1, not of type str"),
        ({"interrupted": 0}, "interrupted is 0, not of type bool"),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = golden(tmp_path)
    redescribed(path, change)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        checkpoint.load(path)
    assert f"checkpoint {str(path)!r} is damaged" in str(error.value)


@pytest.mark.parametrize("value", [None, torch.zeros(3)], ids=["absent", "short"])
@pytest.mark.parametrize("name", ["random.cpu", "optimizer.exp_avg.0"])
def test_a_damaged_tensor_is_named(tmp_path: Path, name: str, value: torch.Tensor | None) -> None:
    path = golden(tmp_path)
    stored = checkpoint.load(path)
    step = TrainStep(TinyLlama(stored.model), stored.train)
    redescribed(path, tensors={name: value})
    with pytest.raises(ConfigError, match=rf"is damaged .*{re.escape(name)}"):
        checkpoint.load(path).restore(step)


def truncate(path: Path) -> None:
    path.write_bytes(golden(path.parent).read_bytes()[:-100])


def of_another_program(path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({"weight": torch.ones(2)}, path, metadata)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (Path.mkdir, "is no file"),
        (os.mkfifo, "is no file"),
        (lambda path: path.write_text("text"), "is not a readable safetensors file"),
        (truncate, "is not a readable safetensors file"),
        (of_another_program, "is a safetensors file of another program"),
        (
            lambda path: of_another_program(path, {"tinyllama": '{"version": 99}'}),
            "has format 99, this program reads 1 and 2",
        ),
    ],
    ids=["missing", "folder", "pipe", "text", "truncated", "foreign", "newer"],
)
def test_a_file_that_is_no_checkpoint_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(ConfigError, match=message) as error:
        checkpoint.load(path)
    assert repr(str(path)) in str(error.value)
