"""Two ranks train as one rank with the whole batch does, and end together whatever happens.

One job of two processes makes everything (`correctness_tests.support.two_ranks`); the tests read
what it wrote.
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

from correctness_tests.support.two_ranks import (
    ARRIVING,
    AT_THE_END,
    CAPTURED,
    CASES,
    CONFIG,
    SABOTEURS,
    SECONDS,
    SEED,
    SHAPE,
    one_step,
    start,
)
from tinyllama.harness.correct.compare import Comparison, Reference, compare
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


NO_GPUS = "ranks on GPUs need two"


class Job:
    """What two ranks on a kind of device have written, how the job ended, and when."""

    def __init__(self, device_type: str, folder: Path, *case: str) -> None:
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
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(NO_GPUS)
    return Job(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """The gradients of the whole batch on one rank: in float32, and in float64."""
    batch = RandomTokens(SHAPE.vocab_size, replace(CONFIG, seed=SEED)).batch(0)

    def exact(moved: int | None) -> dict[str, torch.Tensor]:
        model = TinyLlama(SHAPE, seed=SEED).double()
        if moved is not None:
            generator = torch.Generator().manual_seed(moved)
            for parameter in model.parameters():
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
                parameter.data.mul_(1 + torch.finfo(torch.float32).eps * draw)
        model.loss(*batch).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain = one_step(start("", "v1", CPU, ALONE))["grads"]
    oracle, moved = exact(None), [exact(draw) for draw in range(4)]
    return {n: Reference(plain[n], oracle[n], [m[n] for m in moved]) for n in oracle}


def compared(
    grads: Mapping[str, torch.Tensor], references: dict[str, Reference]
) -> list[Comparison]:
    assert grads.keys() == references.keys()
    return [compare(f"grad {name}", grads[name], r) for name, r in references.items()]


# -- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, (_, _, settings) in CASES.items() if not settings])
def test_two_ranks_give_the_gradients_of_the_whole_batch(
    job: Job, name: str, references: dict[str, Reference]
) -> None:
    for found in compared(job[name]["grads"], references):
        assert found.passed, str(found)
        assert found.sees_zero, f"{found.name}: zeros would pass"
        assert found.sees_scale, f"{found.name}: a factor 1.01 would pass"


def test_the_way_of_each_tier(job: Job) -> None:
    """V4 reduces a block's gradients before it updates the block, beside the backward pass; where
    its plan for a chip is V3's blocks, as V3 does."""
    ways = {name: job[name]["way"] for name in CASES}
    blocks = job.device.type != "cpu" and ways["v4"].startswith("Parallel")
    for name, (tier, shards, settings) in CASES.items():
        beside = tier == "v4" and not settings and not blocks
        by = "copies" if "copies" in name else None if shards else "collectives"
        assert job[name]["reduced"] == by, name
        kinds = {
            None: "Sharded",
            "copies": "CopiedBeside" if beside else "Copied",
            "collectives": "Beside" if beside else "Parallel",
        }
        at_once = by is None or tier == "v1" or "max_grad_norm" in settings
        early = not at_once and (not beside or name.startswith(AT_THE_END))
        assert ways[name] == kinds[by] + (", early" if early else ""), name
    assert not any(job[name]["captured"] for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_make_the_same_update(job: Job, name: str) -> None:
    """From the gradients of the whole batch: V4's could come before them."""
    first, second = job[name]["parameters"]
    assert first == second


@pytest.mark.parametrize(
    ("name", "same"),
    [("reduced late", "v3"), *((f"copied late {name}", f"{name} by copies") for name in ARRIVING)],
)
def test_an_early_update_waits_for_each_reduction(
    job: Job, references: dict[str, Reference], name: str, same: str
) -> None:
    late = job[name]
    assert late["parameters"] == job[same]["parameters"]
    assert all(found.passed for found in compared(late["grads"], references))


@pytest.mark.parametrize("kind", ["left out", "left out by copies"])
@pytest.mark.parametrize("tier", SABOTEURS["left out"])
def test_updates_from_a_part_of_the_batch_differ(job: Job, kind: str, tier: str) -> None:
    first, second = job[f"{kind} {tier}"]["parameters"]
    assert first != second


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_compiled_and_captured_steps_over_nccl(
    name: str, references: dict[str, Reference], tmp_path: Path
) -> None:
    """What a tier does on one GPU it does on two, but for V2's graph of all blocks."""
    if torch.cuda.device_count() < 2:
        pytest.skip(NO_GPUS)
    tier, shards, settings = CAPTURED[name]
    found = Job("cuda", tmp_path, name)[name]
    assert found["captured"] == (not shards)
    not_here = {"one compiled graph"} if tier == "v2" else set()
    assert found["left_out"].keys() - {"overlapped reduction", "overlap"} == (
        not_here | ({"capture"} if shards else set())
    )
    first, second = found["parameters"]
    assert first == second
    if settings:
        same_as_alone(found, tier, settings)
        return
    for each in compared(found["grads"], references):
        assert each.passed, str(each)
        assert each.sees_zero, f"{each.name}: zeros would pass"


@pytest.mark.parametrize("name", [n for n, (_, _, settings) in CASES.items() if settings])
def test_settings_mean_the_whole_batch(job: Job, name: str) -> None:
    tier, _, settings = CASES[name]
    same_as_alone(job[name], tier, settings)


def same_as_alone(got: Mapping[str, Any], tier: str, settings: Mapping[str, Any]) -> None:
    """Loss, norm and gradients are those of one rank on a CPU with the whole batch."""
    alone = one_step(start("", tier, CPU, ALONE, **settings))
    clipped = "max_grad_norm" in settings
    # 100 roundings of float32: sums over at most 31 columns and 16 tokens, in another order.
    close = 100 * torch.finfo(torch.float32).eps
    assert (got["norm"] is not None) == clipped
    if clipped:
        assert got["norm"] == pytest.approx(alone["norm"], rel=close)
        assert got["norm"] > 2 * settings["max_grad_norm"]
    assert got["loss"] == pytest.approx(alone["loss"], rel=close)
    assert got["grads"].keys() == alone["grads"].keys()
    for parameter, gradient in alone["grads"].items():
        error = (got["grads"][parameter] - gradient).norm() / gradient.norm()
        assert error <= close, parameter


@pytest.mark.parametrize(
    ("kind", "tier"), [(kind, tier) for kind, tiers in SABOTEURS.items() for tier in tiers]
)
def test_a_wrong_mean_is_seen(
    job: Job, kind: str, tier: str, references: dict[str, Reference]
) -> None:
    wrong = compared(job[f"{kind} {tier}"]["grads"], references)
    assert not any(found.passed for found in wrong), [str(f) for f in wrong if f.passed]


# -- runs -------------------------------------------------------------------------------------


def alike(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> float:
    """The largest error of a parameter, over how far training has moved it."""
    start = dict(TinyLlama(SHAPE, seed=CONFIG.seed).named_parameters())
    errors = []
    for name, before in start.items():
        mine, theirs = one.tensors[f"model.{name}"], other.tensors[f"model.{name}"]
        errors.append(((mine - theirs).norm() / (theirs - before).norm()).item())
    return max(errors)


def equal(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> bool:
    assert one.tensors.keys() == other.tensors.keys()
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("way", ["whole", "shards"])
def test_a_checkpoint_is_that_of_one_rank(job: Job, way: str, tmp_path: Path) -> None:
    """The same batch and, within rounding, the same training; and one rank goes on from it."""
    whole = train(SHAPE, CONFIG, device="cpu", save_to=tmp_path / "alone.safetensors")
    assert job["runs"][way] == pytest.approx(whole.losses, rel=1e-5)
    alone, ours = checkpoint.load(tmp_path / "alone.safetensors"), job.checkpoint(f"{way}-all")
    assert (ours.model, ours.train, ours.steps) == (alone.model, alone.train, alone.steps)
    own = {"random.device"} if job.device.type != "cpu" else set()  # a GPU's generator
    assert ours.tensors.keys() - own == alone.tensors.keys()
    assert alike(ours, alone) < 1e-3  # Adam divides by the gradient's size, however small
    first = job.checkpoint(f"{way}-first")
    rest = replace(CONFIG, num_steps=2)
    train(SHAPE, rest, device="cpu", resume=first, save_to=tmp_path / "resumed.safetensors")
    assert alike(checkpoint.load(tmp_path / "resumed.safetensors"), alone) < 1e-3


@pytest.mark.parametrize("way", ["whole", "shards"])
def test_as_many_ranks_resume_bit_for_bit(job: Job, way: str) -> None:
    if job.device.type != "cpu":
        pytest.skip("bit for bit is a promise on the CPU")
    assert equal(job.checkpoint(f"{way}-both"), job.checkpoint(f"{way}-all"))
    assert not equal(job.checkpoint(f"{way}-first"), job.checkpoint(f"{way}-all"))


@pytest.mark.parametrize("way", ["whole", "shards"])
def test_two_ranks_resume_what_one_saved(job: Job, way: str) -> None:
    assert job.checkpoint(f"{way}-alone").steps == 1
    assert alike(job.checkpoint(f"{way}-back"), job.checkpoint(f"{way}-all")) < 1e-3


def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any(job: Job) -> None:
    found = job["not finite"]
    assert found["loss"] != found["loss"]
    assert found["same"] == [True, True]


def test_a_signal_to_one_rank_ends_all_after_one_step(job: Job) -> None:
    (first, second), saved = job["runs"]["signal"], job.checkpoint("signal")
    assert first[:2] == second[:2] == ("interrupted", 3)
    assert first[2] == "a signal to another rank after 3 of 50 steps"
    assert second[2] == "SIGTERM after 3 of 50 steps"
    assert (saved.steps, saved.interrupted) == (3, True)


def test_the_first_rank_prints_and_writes(job: Job) -> None:
    assert job["command"]["status"] == [0, 0]
    assert job.ended.stdout.count("gradients    20 of 20 parameters") == 1
    assert "ranks        2, each with all parameters and its part of the batch" in job.ended.stdout
    assert "gradients summed by copies" in job.ended.stdout
    assert job.checkpoint("cli").steps == 2


def test_settings_that_differ_are_refused_on_both(job: Job) -> None:
    errors = job["different"]["errors"]
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("seed is 0 on rank 0 and 1 on rank 1: start all ranks with")


def test_a_rank_that_is_killed_ends_the_job_and_loses_no_checkpoint(job: Job) -> None:
    """It is killed right after its third step, while the other is in the fourth or before it."""
    assert job.ended.returncode == 1
    assert "exitcode  : -9" in job.ended.stderr  # SIGKILL, as the root cause
    kept = job.checkpoint("killed")
    assert kept.checksummed
    assert kept.steps in (2, 3)
    assert job.seconds < 7 * SECONDS
    resumed = train(SHAPE, replace(CONFIG, num_steps=1), device="cpu", resume=kept)
    assert resumed.status == "completed"


# -- parts, and what is refused ----------------------------------------------------------------


def test_parts_are_the_batch(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(1, 31)) * 5)
    config = TrainConfig(batch_size=6, accumulate=2, seq_len=5)
    for source in (RandomTokens(31, config), TextBytes(text, 31, config)):
        parts = [source.batch(7, Ranks(rank, 3)) for rank in range(3)]
        for whole, *mine in zip(source.batch(7), *parts, strict=True):
            assert torch.equal(torch.cat(mine), whole)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"batch_size": 3}, r"batch_size 3 does not divide by 2 ranks: use a multiple of 2"),
        ({"memory": "small"}, r"and the mean over 2 ranks needs them: use memory fast"),
    ],
)
def test_what_ranks_cannot_do_is_refused(settings: dict[str, Any], error: str) -> None:
    plan = StepPlan(memory=settings.pop("memory", "fast"))
    with pytest.raises(ConfigError, match=error):
        TrainStep(TinyLlama(SHAPE), replace(CONFIG, **settings), plan, Ranks(0, 2))


@pytest.mark.parametrize(
    ("tier", "precision", "count", "error"),
    [
        ("v4", "fp32", 2, "tier v4 reads the weights .* use tier v3, or no shards"),
        ("v1", "fp16", 2, "precision fp16 looks for gradients that overflow.* use precision bf16"),
        ("v1", "fp32", 1, "one rank has nothing to shard: start several with torchrun"),
    ],
)
def test_what_shards_cannot_do_is_refused(
    tier: str, precision: str, count: int, error: str
) -> None:
    config = replace(CONFIG, precision=precision)
    with pytest.raises(ConfigError, match=error):
        shard(TinyLlama(SHAPE, tier), config, CPU, Ranks(0, count))
