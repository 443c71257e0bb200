"""What two ranks give, written to a folder: the jobs that `test_ranks.py` starts with torchrun.

    torchrun --nproc-per-node 2 -m correctness_tests.support.two_ranks DEVICE FOLDER [CASE]

Each case is a file of gradients and numbers, which rank 0 writes. Without CASE all that any device
can run are made. SIGKILL and SIGSTOP are cases too: rank 1 sends it to itself during a training.
"""

import hashlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinyllama.cli import main
from tinyllama.harness.machine.errors import UsageError
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS
from tinyllama.training import checkpoint
from tinyllama.training.data import RandomTokens
from tinyllama.training.ranks import Ranks, device_of, joined, launched
from tinyllama.training.shards import full_tensor, local, shard
from tinyllama.training.step import TrainStep, products
from tinyllama.training.train import StepRecord, train

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=31
)  # kernels are interpreted
CONFIG = TrainConfig(batch_size=2, seq_len=4, num_steps=3, learning_rate=1e-2)
SEED = 3
PARTS = ("first", "both", "alone", "back", "all")  # of a run that is resumed
SECONDS = 120  # that a rank waits for the other
PATIENCE = 8  # the same, where one is killed or stopped
# As options of `tinyllama train`, whose vocabulary and width of the MLP have no option.
COMMAND = (
    *("train", "--hidden-dim", "32", "--num-layers", "2", "--num-heads", "4"),
    *("--batch-size", "4", "--seq-len", "6"),
)

# name: tier, in shards, settings
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{tier: (tier, False, {}) for tier in TIERS},
    **{f"{tier} in shards": (tier, True, {}) for tier in ("v1", "v2", "v3")},
    "accumulated": ("v3", False, {"accumulate": 2}),
    "v1 rounded sums": ("v1", False, {"reduce_in": "bf16"}),
    "v4 rounded sums": ("v4", False, {"reduce_in": "bf16"}),
    "v1 rounded sums, in shards": ("v1", True, {"reduce_in": "bf16"}),
    "clipped": ("v4", False, {"max_grad_norm": 0.1}),
    "clipped in shards": ("v1", True, {"max_grad_norm": 0.1, "accumulate": 2}),
}
# Compiled and captured as the tier's plan is on a GPU; a CPU captures nothing. A job for each.
CAPTURED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{f"{tier} captured": (tier, False, {}) for tier in ("v2", "v3", "v4")},
    "v3 captured, rounded sums": ("v3", False, {"reduce_in": "bf16"}),
    "v4 captured, rounded sums": ("v4", False, {"reduce_in": "bf16"}),
    "v3 captured, accumulated": ("v3", False, {"accumulate": 2}),
    "v4 captured, clipped": ("v4", False, {"max_grad_norm": 0.1}),
    "v2 compiled in shards": ("v2", True, {}),
}


def start(name: str, tier: str, device: torch.device, ranks: Ranks, **settings: Any) -> TrainStep:
    config = replace(CONFIG, seed=SEED, **settings)
    off = () if name in CAPTURED else ("compile", "capture")
    model = TinyLlama(SHAPE, TIERS[tier].without(*off), seed=SEED)
    if name.endswith("in shards"):
        shard(model, config, device, ranks)
    else:
        model.to(device)
    step = TrainStep(model, config, ranks=ranks)
    if name in CAPTURED:
        with products("fp32", device):
            step.prepare()
    return step


def one_step(step: TrainStep) -> dict[str, Any]:
    """Loss, norm and gradients of a step's first batch, and what each rank has then."""
    batch = RandomTokens(SHAPE.vocab_size, step.config).batch(0, step.ranks)
    with products("fp32", step.device):
        loss = step(*(half.to(step.device) for half in batch)).item()
    named = step.model.named_parameters()
    grads = {
        name: full_tensor(local(p.grad), p).cpu().clone() for name, p in named if p.grad is not None
    }
    digest = hashlib.sha256()
    for parameter in step.model.parameters():  # as the update left them
        digest.update(full_tensor(local(parameter.detach()), parameter).cpu().numpy().tobytes())
    return {
        "loss": loss,
        "norm": None if step.norm is None else step.norm.item(),
        "grads": grads,
        "left_out": step.left_out,
        "captured": bool(step.graphs),
        "parameters": step.ranks.gathered(digest.hexdigest()),
    }


def not_finite_on_one_rank(device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """A step whose loss is NaN on rank 1 only: is anything different afterwards?"""
    step = start("", "v1", device, ranks)
    if ranks.rank == 1:
        loss_of = step.model.loss_of
        step.model.loss_of = lambda *inputs: loss_of(*inputs) * torch.nan
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

    results: dict[str, Any] = {}
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
        results[name] = run(save_to=paths["all"], in_shards=shards).losses

    def interrupt(record: StepRecord) -> None:
        if ranks.rank == 1 and record.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    ended = run(num_steps=50, on_step=interrupt, save_to=folder / "signal.safetensors")
    results["signal"] = ranks.gathered((ended.status, len(ended.losses), ended.reason))
    return results


def signalled(sent: signal.Signals, device_type: str, folder: Path, tier: str) -> int:
    """A training in which rank 1 gets a signal when the first checkpoint is there."""
    saved = folder / "saved.safetensors"

    def send() -> None:
        while not saved.is_file():
            time.sleep(0.01)
        os.kill(os.getpid(), sent)

    if launched().rank == 1:
        threading.Thread(target=send, daemon=True).start()
    options = ["--tier", tier, "--device", device_type, "--rank-timeout", str(PATIENCE)]
    saving = ["--num-steps", "1000000", "--save", str(saved), "--save-every", "1"]
    return main([*COMMAND, *options, *saving])


def job(device_type: str, folder: Path, case: str | None = None) -> None:
    ranks = replace(launched(), seconds=SECONDS)
    device = device_of(ranks, device_type)

    def put(name: str, results: dict[str, Any]) -> None:
        if ranks.first:
            torch.save(results, folder / f"{name}.pt")

    with joined(ranks, device):
        if case is not None:
            tier, _, settings = CAPTURED[case]
            put(case, one_step(start(case, tier, device, ranks, **settings)))
            return
        command = [*COMMAND, "--device", device_type, "--num-steps", "2"]
        saved = str(folder / "cli.safetensors")
        put("command", {"status": ranks.gathered(main([*command, "--save", saved]))})
        for name, (tier, _, settings) in CASES.items():
            put(name, one_step(start(name, tier, device, ranks, **settings)))
        put("not finite", not_finite_on_one_rank(device, ranks))
        put("different", different_settings(ranks))
        put("runs", runs(device, ranks, folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    device_name, folder_name, *rest = sys.argv[1:]
    if rest and rest[0].startswith("SIG"):
        name, tier = rest
        sys.exit(signalled(signal.Signals[name], device_name, Path(folder_name), tier))
    job(device_name, Path(folder_name), *rest)
