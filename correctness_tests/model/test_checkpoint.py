"""Saved runs: they go on as if they had never stopped, in any tier, and are never half there."""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from correctness_tests.support.runs import CONFIG, MODEL, ON_CPU, description, run, saved
from correctness_tests.support.steps import leave_to_gpu
from tinyllama.harness.machine.device import memory_bytes
from tinyllama.harness.machine.files import NotWrittenError
from tinyllama.model.config import ConfigError
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, StepPlan
from tinyllama.training import checkpoint
from tinyllama.training.step import TrainStep
from tinyllama.training.train import StepRecord, train

GOLDEN = Path(__file__).with_name("golden") / "version-2.safetensors"
LOSSES = [2.3899402618408203, 2.4830424785614014, 2.3788299560546875]  # of its steps 4 to 6


def assert_same_files(first: Path, second: Path) -> None:
    expected, tensors = load_file(first), load_file(second)
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, tensors[name]), name


# -- it goes on -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("tier", ON_CPU)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"max_grad_norm": 0.5, "accumulate": 3},
        {"plan": StepPlan(memory="small")},
    ],
    ids=str,
)
def test_resumed_run_continues_bit_for_bit(
    tmp_path: Path, tier: str, settings: dict[str, Any]
) -> None:
    straight = run(tier, num_steps=6, save_to=tmp_path / "straight", **settings)
    first = saved(tmp_path / "half", 3, tier, **settings)
    options: dict[str, Any] = {"resume": first, "save_to": tmp_path / "resumed", **settings}
    second = run(tier, num_steps=3, **options)
    assert second.start == 3
    assert second.losses == straight.losses[3:]
    assert_same_files(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize("reader", TIERS)
@pytest.mark.parametrize("writer", TIERS)
def test_any_tier_loads_the_checkpoint_of_any_tier(
    tmp_path: Path, writer: str, reader: str, device: torch.device
) -> None:
    for tier in (writer, reader):
        leave_to_gpu(tier, device)
    options: dict[str, Any] = {"device": device, "plan": StepPlan()}
    straight = run(writer, num_steps=6, **options)
    half = saved(tmp_path / "saved", 3, writer, **options)
    resumed = run(reader, num_steps=3, resume=half, **options)
    assert resumed.losses == pytest.approx(straight.losses[3:], rel=1e-4)


def test_stored_file_continues_its_curve() -> None:
    """A file from before this version of the program: its names are those of the model."""
    stored = checkpoint.load(GOLDEN)
    assert (stored.steps, stored.tier, stored.batches) == (3, "v1", {"kind": "random tokens"})
    resumed = train(stored.model, replace(stored.train, num_steps=3), device="cpu", resume=stored)
    assert resumed.losses == pytest.approx(LOSSES, rel=1e-5)


def test_file_is_plain_safetensors(tmp_path: Path) -> None:
    saved(tmp_path / "saved", 2)
    tensors = load_file(tmp_path / "saved")
    parameters = {f"model.{name}": p.shape for name, p in TinyLlama(MODEL).named_parameters()}
    assert parameters.items() <= {name: t.shape for name, t in tensors.items()}.items()
    assert tensors["optimizer.steps"] == description(tmp_path / "saved")["steps"] == 2


@pytest.mark.long
def test_interrupted_run_is_marked_and_continues(tmp_path: Path) -> None:
    def stop(record: StepRecord) -> None:
        raise KeyboardInterrupt

    run(num_steps=6, save_to=tmp_path / "cut", on_step=stop)
    cut = checkpoint.load(tmp_path / "cut")
    assert (cut.interrupted, cut.steps) == (True, 1)
    assert run(num_steps=5, resume=cut).losses == run(num_steps=6).losses[1:]


def test_run_saves_after_every_so_many_steps_of_its_own(tmp_path: Path) -> None:
    path, steps = tmp_path / "saved", []
    first = saved(tmp_path / "first", 1)

    def look(record: StepRecord) -> None:
        steps.append(checkpoint.load(path).steps if path.exists() else None)

    run(num_steps=5, save_to=path, save_every=2, resume=first, on_step=look)
    assert steps == [None, 3, 3, 5, 5]
    assert checkpoint.load(path).steps == 6


# -- it is refused ----------------------------------------------------------------------------


@pytest.mark.long
def test_no_changed_byte_passes(tmp_path: Path) -> None:
    """Some of the header, and fewer of the tensors; and none with another version's label."""
    path = tmp_path / "file"
    shutil.copy(GOLDEN, path)
    content, tensors, manifest = path.read_bytes(), load_file(path), description(path)
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(0, header, 9), *range(header, len(content), 301)]:
        changed = bytearray(content)
        changed[place] ^= 0xFF if place % 2 else 0x01
        path.write_bytes(changed)
        with suppress(ConfigError):
            loaded = checkpoint.load(path)
            assert description(path) == manifest, place  # JSON has several ways to say the same
            assert all(torch.equal(loaded.tensors[name], t) for name, t in tensors.items()), place
    tensors["model.embedding"][0, 0] += 1e-3
    for label in (manifest, {**manifest, "version": 1}):
        save_file(tensors, path, {"tinyllama": json.dumps(label)})
        with pytest.raises(ConfigError, match=r"is damaged|has format 1"):
            checkpoint.load(path)


def of_another_program(path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({"weight": torch.ones(2)}, path, metadata)


def too_large(path: Path) -> None:
    """A sparse file: terabytes that take no place on a disk."""
    shutil.copy(GOLDEN, path)
    os.truncate(path, memory_bytes(torch.device("cpu")) + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (os.mkfifo, "is no file"),
        (lambda path: path.write_text("text"), "is damaged"),
        (lambda path: path.write_bytes(GOLDEN.read_bytes()[:-100]), "is damaged"),
        (too_large, "is damaged"),
        (of_another_program, "is a safetensors file of another program"),
        (lambda path: of_another_program(path, {"tinyllama": '{"version": 9}'}), "has format 9"),
        *(
            (lambda path, text=text: of_another_program(path, {"tinyllama": text}), "is damaged")
            for text in ("", "[" * 100_000, '{"version": 2}')
        ),
    ],
)
def test_file_that_is_no_checkpoint_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(ConfigError, match=message) as error:
        checkpoint.load(path)
    assert repr(str(path)) in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_dim": 64}, "has hidden_dim 32, the model 64"),
        ({"rope_theta": 5e5}, r"has rope_theta 10000.0, the model 500000.0"),
    ],
    ids=str,
)
def test_checkpoint_of_another_shape_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    stored = saved(tmp_path / "saved", 1)
    with pytest.raises(ConfigError, match=message):
        train(replace(MODEL, **change), CONFIG, device="cpu", resume=stored)


@pytest.mark.long
def test_failed_run_or_broken_state_replaces_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved(path, 1)
    before = path.read_bytes()
    failing = replace(CONFIG, learning_rate=1e18)
    assert train(MODEL, failing, device="cpu", save_to=path).status == "failed"
    step = TrainStep(TinyLlama(MODEL), CONFIG)
    with torch.no_grad():
        step.model.final_norm[3] = math.nan
    with pytest.raises(NotWrittenError, match=r"model\.final_norm has a value that is not finite"):
        checkpoint.save(path, step, 1, {"kind": "random tokens"})
    assert path.read_bytes() == before
