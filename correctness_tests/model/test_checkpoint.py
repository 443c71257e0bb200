"""Saved runs: they go on as if they had never stopped, in any tier, and are never half there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from correctness_tests.support.faults import tier_with
from correctness_tests.support.runs import CONFIG, MODEL, ON_CPU, description, run, saved
from correctness_tests.support.steps import leave_to_gpu
from tinyllama.model.config import ConfigError
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, StepPlan
from tinyllama.ops import OPS
from tinyllama.training import checkpoint
from tinyllama.training.train import StepRecord, train


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tier", ON_CPU)
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, tier: str, precision: str) -> None:
    straight = run(tier, num_steps=6, precision=precision, save_to=tmp_path / "whole")
    first = saved(tmp_path / "half", 3, tier, precision=precision)
    second = run(tier, num_steps=3, precision=precision, resume=first, save_to=tmp_path / "resumed")
    assert second.start == 3
    assert second.losses == straight.losses[3:]
    expected, got = load_file(tmp_path / "whole"), load_file(tmp_path / "resumed")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


@pytest.mark.long
def test_with_clipping_and_micro_batches_it_continues_where_it_was_in_the_data(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"max_grad_norm": 0.5, "accumulate": 3}
    straight = run(num_steps=6, **settings)
    first = saved(tmp_path / "half", 3, **settings)
    assert (first.train.max_grad_norm, first.train.accumulate) == (0.5, 3)
    assert run(num_steps=3, resume=first, **settings).losses == straight.losses[3:]


@pytest.mark.long
def test_small_memory_resumes_what_was_fast_and_back(tmp_path: Path) -> None:
    small = StepPlan(memory="small")
    straight = run(num_steps=6, save_to=tmp_path / "whole")
    first = saved(tmp_path / "first", 2)
    middle = run(num_steps=2, resume=first, plan=small, save_to=tmp_path / "second")
    assert middle.plan == "small-memory"
    second = checkpoint.load(tmp_path / "second")
    third = run(num_steps=2, resume=second, save_to=tmp_path / "third")
    assert third.losses == straight.losses[4:]
    expected, got = load_file(tmp_path / "whole"), load_file(tmp_path / "third")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("since", [3, 0], ids="{} steps after an overflow".format)
def test_the_fp16_gradient_scale_continues(tmp_path: Path, since: int) -> None:
    """A scale that started anew would overflow, and skip steps, once more."""
    half = saved(tmp_path / "half", 3, precision="fp16")
    assert half.scaler["_growth_tracker"] == 3
    half.scaler.update(scale=1024.0, _growth_tracker=since)
    run(num_steps=1, precision="fp16", resume=half, save_to=tmp_path / "resumed")
    assert checkpoint.load(tmp_path / "resumed").scaler["scale"] == 1024.0


@pytest.mark.long
def test_random_numbers_continue(tmp_path: Path, device: torch.device) -> None:
    """Held by a tier that draws some: with dropout, another state is another curve."""
    swiglu = OPS["swiglu"]["eager"]
    with tier_with("swiglu", lambda *args: F.dropout(swiglu(*args), 0.5), "dropping") as tier:
        straight = run(tier, num_steps=6, device=device).losses
        assert run(tier, num_steps=6, device=device).losses == pytest.approx(straight, rel=1e-4)
        half = saved(tmp_path / "half", 3, tier, device=device)
        resumed = run(tier, num_steps=3, device=device, resume=half).losses
    assert resumed == pytest.approx(straight[3:], rel=1e-4)


@pytest.mark.long
def test_training_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(12345)
    before = torch.get_rng_state()
    run(num_steps=1, resume=saved(tmp_path / "saved", 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reader", TIERS)
@pytest.mark.parametrize("writer", TIERS)
def test_any_tier_loads_any_tiers_checkpoint(
    tmp_path: Path, writer: str, reader: str, device: torch.device
) -> None:
    for tier in (writer, reader):
        leave_to_gpu(tier, device)
    options: dict[str, Any] = {"device": device, "plan": StepPlan()}
    straight = run(writer, num_steps=6, **options)
    half = saved(tmp_path / "saved", 3, writer, **options)
    resumed = run(reader, num_steps=3, resume=half, **options)
    assert resumed.losses == pytest.approx(straight.losses[3:], rel=1e-4)


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    saved(tmp_path / "saved", 2)
    model = TinyLlama(MODEL)
    tensors = load_file(tmp_path / "saved")
    parameters = {f"model.{name}": p.shape for name, p in model.named_parameters()}
    assert parameters.items() <= {name: t.shape for name, t in tensors.items()}.items()
    assert tensors["optimizer.steps"] == 2
    described = description(tmp_path / "saved")
    assert described["steps"] == 2
    assert described["model"]["hidden_dim"] == 32


def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    saved(tmp_path / "saved", 1)
    (tmp_path / "other").touch()
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.long
def test_an_interrupted_run_is_marked(tmp_path: Path) -> None:
    def stop(record: StepRecord) -> None:
        raise KeyboardInterrupt

    assert not saved(tmp_path / "whole", 1).interrupted
    run(num_steps=6, save_to=tmp_path / "cut", on_step=stop)
    cut = checkpoint.load(tmp_path / "cut")
    assert cut.interrupted
    assert cut.steps == 1
    assert run(num_steps=5, resume=cut).losses == run(num_steps=6).losses[1:]


@pytest.mark.long
def test_a_failed_run_does_not_replace_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved(path, 1)
    before = path.read_bytes()
    failing = replace(CONFIG, learning_rate=1e18)
    assert train(MODEL, failing, device="cpu", save_to=path).status == "failed"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_dim": 64}, "has hidden_dim 32, the model 64"),
        ({"num_layers": 3}, "has num_layers 2, the model 3"),
        ({"num_kv_heads": 1}, "has num_kv_heads 2, the model 1"),
        ({"num_heads": 2}, "has num_heads 4, the model 2"),
        ({"ffn_dim": 96}, "has ffn_dim .*, the model 96"),
        ({"vocab_size": 300}, "has vocab_size .*, the model 300"),
        ({"norm_eps": 1e-3}, "has norm_eps 1e-05, the model 0.001"),
        ({"rope_theta": 5e5}, r"has rope_theta 10000.0, the model 500000.0"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_shape_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    stored = saved(tmp_path / "saved", 1)
    with pytest.raises(ConfigError, match=message):
        train(replace(MODEL, **change), CONFIG, device="cpu", resume=stored)
