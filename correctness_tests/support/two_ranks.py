"""What two ranks give, written to a folder: the job that `test_ranks.py` starts once with torchrun.

    torchrun --nproc-per-node 2 -m correctness_tests.support.two_ranks DEVICE FOLDER [CASE]

Each case is a file of gradients and numbers, which rank 0 writes. Without CASE all that any device
can run are made, and in the last one rank 1 kills itself, so the job must fail, and soon.
"""

import contextlib
import hashlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tinyllama.cli import main
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.machine.errors import UsageError
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS
from tinyllama.ops.stack.configs import BESIDE
from tinyllama.training import checkpoint, peers, reduction
from tinyllama.training.data import RandomTokens
from tinyllama.training.ranks import Ranks, device_of, joined, launched
from tinyllama.training.shards import shard, whole
from tinyllama.training.step import TrainStep, products
from tinyllama.training.train import StepRecord, train

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=31
)  # kernels are interpreted
CONFIG = TrainConfig(batch_size=2, seq_len=4, num_steps=3, learning_rate=1e-2)
SEED = 3
PARTS = ("first", "both", "alone", "back", "all")  # of a run that is resumed
SECONDS = 120  # that a rank waits for the other
# As options of `tinyllama train`, whose vocabulary and width of the MLP have no option.
COMMAND = (
    *("train", "--hidden-dim", "32", "--num-layers", "2", "--num-heads", "4"),
    *("--batch-size", "4", "--seq-len", "6", "--num-steps", "2", "--rank-timeout", str(SECONDS)),
    *("--reduce", "copies"),
)

AT_THE_END = "v4, updated at the end,"
# Whose parameters are updated as sums by copies arrive.
ARRIVING = ("v2", "v3", "v4", AT_THE_END)
# name: tier, in shards, settings
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{tier: (tier, False, {}) for tier in TIERS},
    **{f"{tier} by copies": (tier, False, {}) for tier in ("v1", "v2", "v3", "v4")},
    f"{AT_THE_END} by copies": ("v4", False, {}),
    "accumulated by copies": ("v3", False, {"accumulate": 2}),
    "clipped by copies": ("v4", False, {"max_grad_norm": 0.1}),
    **{f"{tier} in shards": (tier, True, {}) for tier in ("v1", "v2", "v3")},
    "accumulated": ("v1", False, {"accumulate": 2}),
    "clipped": ("v1", False, {"max_grad_norm": 0.1}),
    "clipped in shards": ("v1", True, {"max_grad_norm": 0.1, "accumulate": 2}),
}
# Compiled and captured as the tier's plan is on a GPU; a CPU captures nothing. A job for each.
CAPTURED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{f"{tier} captured": (tier, False, {}) for tier in ("v2", "v3", "v4")},
    **{f"{tier} captured, by copies": (tier, False, {}) for tier in ("v2", "v3", "v4")},
    f"{AT_THE_END} captured, by copies": ("v4", False, {}),
    "v3 captured, accumulated": ("v3", False, {"accumulate": 2}),
    "v4 captured, clipped": ("v4", False, {"max_grad_norm": 0.1}),
    "v3 captured, accumulated, by copies": ("v3", False, {"accumulate": 2}),
    "v4 captured, clipped, by copies": ("v4", False, {"max_grad_norm": 0.1}),
    "v2 compiled in shards": ("v2", True, {}),
}
# And the tiers whose way of reducing it changes.
SABOTEURS = {
    "left out": ("v1", "v3", "v4"),
    "left out by copies": ("v1", "v3", "v4"),
    "averaged twice": ("v1", "v3", "v4"),
    "averaged twice by copies": ("v3", "v4"),
    "another seed": ("v1",),
    "a part read twice": ("v1",),
}


def start(name: str, tier: str, device: torch.device, ranks: Ranks, **settings: Any) -> TrainStep:
    config = replace(CONFIG, seed=SEED, **settings)
    off = () if name in CAPTURED else ("compile", "capture")
    model = TinyLlama(SHAPE, TIERS[tier].without(*off), seed=SEED)
    if name.endswith("in shards"):
        shard(model, config, device, ranks)
    else:
        model.to(device)
    beside: Any = contextlib.nullcontext()
    if name.startswith(AT_THE_END):
        key: dict[str, Any] = {"rows": 4, "width": 16, "kind": "fp32"}
        beside = BESIDE.force(Config(ON=0), **key)
    with beside:
        step = TrainStep(model, config, ranks=ranks, reduce=way_of(name, ranks))
    if name in CAPTURED:
        with products("fp32", device):
            step.prepare()
    return step


def way_of(name: str, ranks: Ranks) -> str | None:
    """As its name says; without a word by collectives, on GPUs too."""
    if ranks.count == 1 or name.endswith("in shards"):
        return None
    return reduction.COPIES if name.endswith("by copies") else reduction.COLLECTIVES


class SharedMemory:
    """A stand-in on CPUs for the symmetric memory of GPUs: files that all ranks map."""

    made = 0

    def __init__(self, folder: Path, ranks: Ranks, like: torch.Tensor) -> None:
        self.rank = ranks.rank
        self._name = f"{folder}/memory-{SharedMemory.made}"
        SharedMemory.made += 1
        self.own = self.get_buffer(self.rank, like.shape, like.dtype)
        self.barrier()

    def get_buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        name = f"{self._name}-{rank}"
        return torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype)

    def barrier(self, timeout_ms: int = 0) -> None:
        torch.distributed.barrier()


@contextlib.contextmanager
def shared_memory(device: torch.device, ranks: Ranks, folder: Path) -> Iterator[None]:
    """Ranks on CPUs can copy from each other, by a stand-in."""

    def connected(like: torch.Tensor) -> tuple[torch.Tensor, SharedMemory]:
        memory = SharedMemory(folder, ranks, like)
        return memory.own, memory

    if device.type != "cpu":
        yield
        return
    with (
        mock.patch.object(peers, "_no_access", return_value=None),
        mock.patch.object(peers, "_connected", connected),
    ):
        yield


def one_step(
    step: TrainStep, batches: RandomTokens | None = None, part: Ranks | None = None
) -> dict[str, Any]:
    """Loss, norm and gradients of a step's first batch, and how they were reduced."""
    batches = batches or RandomTokens(SHAPE.vocab_size, step.config)
    batch = batches.batch(0, part or step.ranks)
    with products("fp32", step.device):
        loss = step(*(half.to(step.device) for half in batch)).item()
    named = step.model.named_parameters()
    grads = {name: whole(_own(p.grad), p).cpu().clone() for name, p in named if p.grad is not None}
    norm = None if step.norm is None else step.norm.item()
    way = type(step._reduction).__name__ + (", early" if step._reduction.early else "")
    found = hashlib.sha256()
    for parameter in step.model.parameters():  # as the update left them
        found.update(whole(_own(parameter.detach()), parameter).cpu().numpy().tobytes())
    return {
        **{"loss": loss, "norm": norm, "grads": grads, "way": way, "left_out": step.left_out},
        "captured": bool(step.graphs),
        "reduced": step.reduced,
        "parameters": step.ranks.gathered(found.hexdigest()),
    }


def _own(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "placements") else gradient


def sabotaged(kind: str, tier: str, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    step = start(kind, tier, device, ranks)
    if kind == "another seed":
        seed = SEED + ranks.rank
        return one_step(step, RandomTokens(SHAPE.vocab_size, replace(step.config, seed=seed)))
    if kind == "a part read twice":
        return one_step(step, part=Ranks(0, ranks.count))
    if kind.startswith("averaged twice"):
        step._share = step._share / ranks.count
        return one_step(step)
    expect = partial(step._reduction.expect, False)
    with (
        mock.patch.object(step._reduction, "expect", side_effect=lambda _: expect()),
        mock.patch.object(reduction, "_sum"),
        mock.patch.object(peers.PeerGradients, "_sum"),
    ):
        return one_step(step)


def reduced_late(device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """V3's step where a reduction happens only when it is waited for."""
    at_once = torch.distributed.all_reduce

    class Late:
        def __init__(self, gradients: torch.Tensor) -> None:
            self._gradients = gradients

        def wait(self) -> None:
            at_once(self._gradients)

    def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        return Late(tensor) if async_op else at_once(tensor, group=group)

    step = start("", "v3", device, ranks)
    with mock.patch.object(torch.distributed, "all_reduce", all_reduce):
        return one_step(step)


def copied_late(name: str, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """A step where a sum by copies happens only when it is waited for."""
    ours = peers.PeerGradients
    at_once, at_the_end, waiting = ours.sum, ours.finish, []

    def late(self: peers.PeerGradients, group: dict[int, torch.Tensor]) -> Any:
        waiting.append(partial(at_once, self, group))
        return waiting[-1]

    def wait(self: peers.PeerGradients, begin: Any) -> None:
        waiting.remove(begin)
        self._side.wait(begin())

    def finish(self: peers.PeerGradients) -> None:
        while waiting:
            waiting.pop(0)()
        at_the_end(self)

    name = f"{name} by copies"
    step = start(name, CASES[name][0], device, ranks)
    with (
        mock.patch.object(ours, "sum", late),
        mock.patch.object(ours, "wait", wait),
        mock.patch.object(ours, "finish", finish),
    ):
        return one_step(step)


def not_finite_on_one_rank(device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """A step whose loss is NaN on rank 1 only: is anything different afterwards?"""
    step = start("", "v1", device, ranks)
    if ranks.rank == 1:
        loss_of = step.model.loss_of
        step.model.loss_of = lambda *given: loss_of(*given) * torch.nan
    before = [p.detach().clone() for p in step.model.parameters()]
    loss = one_step(step)["loss"]
    same = all(map(torch.equal, before, step.model.parameters()))
    return {"loss": loss, "same": ranks.gathered(same)}


def different_settings(ranks: Ranks) -> dict[str, Any]:
    try:
        ranks.check_alike({"batch": 4, "seed": ranks.rank})
    except UsageError as error:
        return {"errors": ranks.gathered(str(error))}
    return {"errors": []}


def runs(device: torch.device, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Whole, in two parts, and ended by a signal to one rank."""

    def run(**options: Any) -> Any:
        config = replace(CONFIG, **{k: options.pop(k) for k in ("num_steps",) if k in options})
        return train(SHAPE, config, "v1", device=device, ranks=ranks, **options)

    found: dict[str, Any] = {}
    for shards in (False, True):
        name = "shards" if shards else "whole"
        paths = {part: folder / f"{name}-{part}.safetensors" for part in PARTS}
        run(num_steps=1, save_to=paths["first"], in_shards=shards)
        torch.distributed.barrier()  # rank 0 writes, both read
        first = checkpoint.load(paths["first"])
        run(num_steps=2, save_to=paths["both"], resume=first, in_shards=shards)
        if ranks.first:
            alone = replace(CONFIG, num_steps=1)
            train(SHAPE, alone, "v1", device=device, save_to=paths["alone"])
        torch.distributed.barrier()
        first = checkpoint.load(paths["alone"])
        run(num_steps=2, save_to=paths["back"], resume=first, in_shards=shards)
        found[name] = run(save_to=paths["all"], in_shards=shards).losses

    def interrupt(record: StepRecord) -> None:
        if ranks.rank == 1 and record.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    ended = run(num_steps=50, on_step=interrupt, save_to=folder / "signal.safetensors")
    found["signal"] = ranks.gathered((ended.status, len(ended.losses), ended.reason))
    return found


def die(device: torch.device, ranks: Ranks, folder: Path) -> None:
    def kill(record: StepRecord) -> None:
        if ranks.rank == 1 and record.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    config = replace(CONFIG, num_steps=1000)
    path = folder / "killed.safetensors"
    train(SHAPE, config, device=device, ranks=ranks, save_to=path, save_every=1, on_step=kill)


def job(device_type: str, folder: Path, case: str | None = None) -> None:
    ranks = replace(launched(), seconds=SECONDS)
    device = device_of(ranks, device_type)

    def put(name: str, found: dict[str, Any]) -> None:
        if ranks.first:
            torch.save(found, folder / f"{name}.pt")

    with joined(ranks, device), shared_memory(device, ranks, folder):
        if case is not None:
            tier, _, settings = CAPTURED[case]
            put(case, one_step(start(case, tier, device, ranks, **settings)))
            return
        command = [*COMMAND, "--device", device_type, "--save", str(folder / "cli.safetensors")]
        put("command", {"status": ranks.gathered(main(command))})
        for name, (tier, _, settings) in CASES.items():
            put(name, one_step(start(name, tier, device, ranks, **settings)))
        for kind, tiers in SABOTEURS.items():
            for tier in tiers:
                put(f"{kind} {tier}", sabotaged(kind, tier, device, ranks))
        put("reduced late", reduced_late(device, ranks))
        for name in ARRIVING:
            put(f"copied late {name}", copied_late(name, device, ranks))
        put("not finite", not_finite_on_one_rank(device, ranks))
        put("different", different_settings(ranks))
        put("runs", runs(device, ranks, folder))
        die(device, ranks, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    job(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
