"""Several ranks train as one rank does with the whole batch, and end together.

torchrun starts two ranks (`correctness_tests.support.two_ranks`); the tests read what they wrote.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.steps import oracle
from correctness_tests.support.two_ranks import (
    CAPTURED,
    CASES,
    CONFIG,
    PATIENCE,
    SECONDS,
    SEED,
    SHAPE,
    one_step,
    start,
)
from tinyllama.harness.check.compare import Comparison, Reference, compare
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training import checkpoint
from tinyllama.training.data import RandomTokens, TextBytes
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.shards import shard
from tinyllama.training.step import TrainStep
from tinyllama.training.train import train

CPU = torch.device("cpu")
LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
AT_A_FREE_PORT = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
JOB = (*LAUNCH, *AT_A_FREE_PORT, "-m", "correctness_tests.support.two_ranks")
TORCHRUN = 30  # seconds that torchrun waits for a rank before it kills it


class Job:
    """What two ranks on a kind of device have written, how the job ended, and when."""

    def __init__(self, device_type: str, folder: Path, *case: str) -> None:
        if device_type == "cuda" and torch.cuda.device_count() < 2:
            pytest.skip("ranks on GPUs need two")
        self.folder, self.device = folder, torch.device(device_type)
        started = time.monotonic()
        self.ended = subprocess.run(
            [sys.executable, *JOB, device_type, str(folder), *case],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=8 * SECONDS,
        )
        self.seconds = time.monotonic() - started

    def __getitem__(self, name: str) -> Any:
        path = self.folder / f"{name}.pt"
        assert path.is_file(), f"the job ended before {name}:\n{self.ended.stderr[-4000:]}"
        return torch.load(path, weights_only=True)

    def checkpoint(self, name: str) -> checkpoint.Checkpoint:
        return checkpoint.load(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """The gradients of the whole batch on one rank: in float32, and in float64."""
    batch = RandomTokens(SHAPE.vocab_size, replace(CONFIG, seed=SEED)).batch(0)

    def exact(moved: int | None) -> dict[str, torch.Tensor]:
        return oracle(CPU, seed=SEED, moved=moved, shape=SHAPE, batch=batch).grads

    plain = one_step(start("", "v1", CPU, ALONE))["grads"]
    right, moved = exact(None), [exact(draw) for draw in range(4)]
    return {n: Reference(plain[n], right[n], [m[n] for m in moved]) for n in right}


def compared(
    grads: Mapping[str, torch.Tensor], references: dict[str, Reference]
) -> list[Comparison]:
    assert grads.keys() == references.keys()
    return [compare(f"grad {name}", grads[name], r) for name, r in references.items()]


# -- gradients --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n, (_, _, settings) in CASES.items() if not settings])
def test_two_ranks_give_the_gradients_of_the_whole_batch(
    job: Job, name: str, references: dict[str, Reference]
) -> None:
    for comparison in compared(job[name]["grads"], references):
        assert comparison.passed, str(comparison)
        assert comparison.sees_zero, f"{comparison.name}: zeros would pass"
        assert comparison.sees_scale, f"{comparison.name}: a factor 1.01 would pass"


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n, (_, _, settings) in CASES.items() if settings])
def test_settings_mean_the_whole_batch(job: Job, name: str) -> None:
    tier, _, settings = CASES[name]
    assert_as_alone(job[name], tier, settings)


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_compiled_and_captured_steps_over_nccl(
    name: str, references: dict[str, Reference], tmp_path: Path
) -> None:
    """What a tier does on one GPU it does on two, but for V2's graph of all blocks."""
    tier, shards, settings = CAPTURED[name]
    step = Job("cuda", tmp_path, name)[name]
    assert step["captured"] == (not shards)
    not_here = {"one compiled graph"} if tier == "v2" else set()
    assert step["left_out"].keys() - {"overlapped reduction", "overlap"} == (
        not_here | ({"capture"} if shards else set())
    )
    first, second = step["parameters"]
    assert first == second
    if settings:
        assert_as_alone(step, tier, settings)
        return
    for comparison in compared(step["grads"], references):
        assert comparison.passed, str(comparison)
        assert comparison.sees_zero, f"{comparison.name}: zeros would pass"


def assert_as_alone(step: Mapping[str, Any], tier: str, settings: Mapping[str, Any]) -> None:
    """Loss, norm and gradients are those of one rank on a CPU with the whole batch."""
    alone = one_step(start("", tier, CPU, ALONE, **settings))
    # 100 roundings of float32: sums over at most 31 columns and 16 tokens, in another order.
    close = 100 * torch.finfo(torch.float32).eps
    clipped = "max_grad_norm" in settings
    assert (step["norm"] is not None) == clipped
    if clipped:
        assert step["norm"] == pytest.approx(alone["norm"], rel=close)
        assert step["norm"] > 2 * settings["max_grad_norm"]
    assert step["loss"] == pytest.approx(alone["loss"], rel=close)
    assert step["grads"].keys() == alone["grads"].keys()
    errors = {
        parameter: ((step["grads"][parameter] - gradient).norm() / gradient.norm()).item()
        for parameter, gradient in alone["grads"].items()
    }
    if settings.get("reduce_in") == "bf16":
        assert max(errors.values()) > close, "nothing was rounded"
        # Each rank's part and their sum are rounded; parts that cancel are larger than the sum.
        close = 4 * torch.finfo(torch.bfloat16).eps
    assert max(errors.values()) <= close, errors


@pytest.mark.long
def test_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any(job: Job) -> None:
    step = job["not finite"]
    assert step["loss"] != step["loss"]
    assert step["same"] == [True, True]


# -- runs -------------------------------------------------------------------------------------


def difference(run: checkpoint.Checkpoint, expected: checkpoint.Checkpoint) -> float:
    """The largest error of a parameter, over how far training has moved it."""
    initial = dict(TinyLlama(SHAPE, seed=CONFIG.seed).named_parameters())
    errors = []
    for name, before in initial.items():
        mine, theirs = run.tensors[f"model.{name}"], expected.tensors[f"model.{name}"]
        errors.append(((mine - theirs).norm() / (theirs - before).norm()).item())
    return max(errors)


@pytest.mark.long
@pytest.mark.parametrize("way", ["whole", "shards"])
def test_checkpoint_is_that_of_one_rank(job: Job, way: str, tmp_path: Path) -> None:
    """The same batch and, within rounding, the same training; and one rank goes on from it."""
    expected = train(SHAPE, CONFIG, device="cpu", save_to=tmp_path / "alone.safetensors")
    assert job["runs"][way] == pytest.approx(expected.losses, rel=1e-5)
    alone, ours = checkpoint.load(tmp_path / "alone.safetensors"), job.checkpoint(f"{way}-all")
    assert (ours.model, ours.train, ours.steps) == (alone.model, alone.train, alone.steps)
    assert ours.tensors.keys() == alone.tensors.keys()
    assert difference(ours, alone) < 1e-3  # Adam divides by the gradient's size, however small
    first = job.checkpoint(f"{way}-first")
    rest = replace(CONFIG, num_steps=2)
    train(SHAPE, rest, device="cpu", resume=first, save_to=tmp_path / "resumed.safetensors")
    assert difference(checkpoint.load(tmp_path / "resumed.safetensors"), alone) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("way", ["whole", "shards"])
def test_as_many_ranks_resume_bit_for_bit(job: Job, way: str) -> None:
    if job.device.type != "cpu":
        pytest.skip("bit for bit is a promise on the CPU")
    resumed, straight = (job.checkpoint(f"{way}-{part}").tensors for part in ("both", "all"))
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(tensor, straight[name]) for name, tensor in resumed.items())


@pytest.mark.long
@pytest.mark.parametrize("way", ["whole", "shards"])
def test_two_ranks_resume_what_one_saved(job: Job, way: str) -> None:
    assert job.checkpoint(f"{way}-alone").steps == 1
    assert difference(job.checkpoint(f"{way}-back"), job.checkpoint(f"{way}-all")) < 1e-3


@pytest.mark.long
def test_first_rank_prints_and_writes(job: Job) -> None:
    assert job["command"]["status"] == [0, 0]
    assert job.ended.stdout.count("gradients    20 of 20 parameters") == 1
    assert "ranks        2, each with all parameters and its part of the batch" in job.ended.stdout
    assert job.checkpoint("cli").steps == 2
    assert job.ended.returncode == 0


# -- how ranks end -----------------------------------------------------------------------------


@pytest.mark.long
def test_signal_to_one_rank_ends_all_after_one_step(job: Job) -> None:
    (first, second), saved = job["runs"]["signal"], job.checkpoint("signal")
    assert first[:2] == second[:2] == ("interrupted", 3)
    assert first[2] == "a signal to another rank after 3 of 50 steps"
    assert second[2] == "SIGTERM after 3 of 50 steps"
    assert (saved.steps, saved.interrupted) == (3, True)


@pytest.mark.slow("torchrun waits 30 s for a process that does not take SIGTERM")
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(
    ("device_type", "tier"),
    [
        ("cpu", "v1"),
        pytest.param("cuda", "v1", marks=pytest.mark.gpu),
        pytest.param("cuda", "v3", marks=pytest.mark.gpu),
        pytest.param("cuda", "v4", marks=pytest.mark.gpu),
    ],
)
def test_rank_that_is_killed_or_stopped_ends_job_and_loses_no_checkpoint(
    device_type: str, tier: str, sent: str, tmp_path: Path
) -> None:
    job = Job(device_type, tmp_path, sent, tier)
    assert job.ended.returncode == 1, job.ended.stderr[-4000:]
    assert "exitcode  : -9" in job.ended.stderr, "torchrun shows which rank that is"
    if sent == "SIGSTOP":
        assert "tinyllama: error: rank 0: another rank has ended, or has not" in job.ended.stderr
    assert job.seconds < PATIENCE + TORCHRUN + SECONDS
    saved = job.checkpoint("saved")
    assert saved.steps >= 1


@pytest.mark.long
def test_settings_that_differ_are_refused_on_both(job: Job) -> None:
    errors = job["different"]["errors"]
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("seed is 0 on rank 0 and 1 on rank 1: start all ranks with")


# -- parts, and what is refused ----------------------------------------------------------------


@pytest.mark.long
def test_parts_of_ranks_make_the_batch(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(1, 31)) * 5)
    config = TrainConfig(batch_size=6, accumulate=2, seq_len=5)
    for source in (RandomTokens(31, config), TextBytes(text, 31, config)):
        parts = [source.batch(7, Ranks(rank, 3)) for rank in range(3)]
        for batch, *mine in zip(source.batch(7), *parts, strict=True):
            assert torch.equal(torch.cat(mine), batch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"batch_size": 3}, r"batch_size 3 does not divide by 2 ranks: use a multiple of 2"),
        ({"memory": "small"}, r"and the mean over 2 ranks needs them: use memory fast"),
    ],
)
def test_ranks_refuse_batch_or_memory_mode(settings: dict[str, Any], error: str) -> None:
    plan = StepPlan(memory=settings.pop("memory", "fast"))
    with pytest.raises(ConfigError, match=error):
        TrainStep(TinyLlama(SHAPE), replace(CONFIG, **settings), plan, Ranks(0, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("tier", "precision", "count", "error"),
    [
        ("v4", "fp32", 2, "tier v4 reads the weights .* use tier v3, or no shards"),
        ("v1", "fp16", 2, "precision fp16 looks for gradients that overflow.* use precision bf16"),
        ("v1", "fp32", 1, "one rank has nothing to shard: start several with torchrun"),
    ],
)
def test_shards_refuse_tier_precision_or_single_rank(
    tier: str, precision: str, count: int, error: str
) -> None:
    config = replace(CONFIG, precision=precision)
    with pytest.raises(ConfigError, match=error):
        shard(TinyLlama(SHAPE, tier), config, CPU, Ranks(0, count))
