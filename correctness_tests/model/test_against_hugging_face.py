"""A training run is that of Hugging Face's Llama and torch's AdamW, with no setting at its default.

No setting has its default, as one that is passed on wrongly mostly has where it arrives.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from correctness_tests.support.steps import slow_steps
from tinyllama.bench.peers.hugging_face import (
    as_hugging_face,
    as_ours,
    hugging_face_llama,
    hugging_face_names,
)
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, Tier
from tinyllama.training.data import RandomTokens
from tinyllama.training.step import TrainStep
from tinyllama.training.train import train

pytestmark = pytest.mark.peers

SHAPE = ModelConfig(
    hidden_dim=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    ffn_dim=40,
    vocab_size=53,
    rope_theta=30.0,
    norm_eps=0.03,
    init_std=0.2,
)
CONFIG = TrainConfig(
    batch_size=2,
    seq_len=19,
    num_steps=4,
    learning_rate=2e-2,
    beta1=0.6,
    beta2=0.9,
    eps=1e-3,
    weight_decay=0.5,
    seed=5,
)
LOSS, MOVED = 1e-5, 1e-3  # how far apart losses and parameters may be, of themselves and of moves
WAYS = [*((name, "fast") for name in TIERS), ("v1", "small"), ("v2", "small"), ("v3", "selective")]


@dataclass
class Run:
    losses: list[float]
    parameters: dict[str, torch.Tensor]


@cache
def theirs(steps: int, model: ModelConfig = SHAPE) -> Run:
    """Nothing of ours but the initial weights and the tokens."""
    pytest.importorskip("transformers", reason="extra 'peers' is not installed")
    initial = dict(TinyLlama(model, seed=CONFIG.seed).named_parameters())
    llama = hugging_face_llama(model)
    named = dict(llama.named_parameters())
    pairs = hugging_face_names(model)
    assert named.keys() == pairs.keys()
    with torch.no_grad():
        for hf, name in pairs.items():
            named[hf].copy_(as_hugging_face(model, name, initial[name]))
    optimizer = torch.optim.AdamW(
        llama.parameters(),
        lr=CONFIG.learning_rate,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
        weight_decay=CONFIG.weight_decay,
    )
    losses = []
    for index in range(steps):
        tokens, targets = RandomTokens(model.vocab_size, CONFIG).batch(index)
        optimizer.zero_grad()
        loss = F.cross_entropy(llama(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = {name: as_ours(model, name, named[hf].detach()) for hf, name in pairs.items()}
    return Run(losses, parameters)


def ours(
    folder: Path,
    tier: str | Tier,
    device: torch.device,
    model: ModelConfig = SHAPE,
    config: TrainConfig = CONFIG,
) -> Run:
    path = folder / "saved"
    result = train(model, config, tier, device=device, save_to=path)
    assert result.status == "completed"
    saved = {name: t for name, t in load_file(path).items() if name.startswith("model.")}
    return Run(result.losses, {name.removeprefix("model."): t for name, t in saved.items()})


def stepped(tier: Tier, steps: int) -> Run:
    """The same by steps alone, where kernels are interpreted and a run would take a minute."""
    step = TrainStep(TinyLlama(SHAPE, tier, seed=CONFIG.seed), CONFIG)
    batches = RandomTokens(SHAPE.vocab_size, CONFIG)
    losses = [step(*batches.batch(index)).item() for index in range(steps)]
    return Run(losses, {name: p.detach() for name, p in step.model.named_parameters()})


def apart(got: Run, expected: Run) -> tuple[float, float]:
    """The largest distance of a loss, and of a parameter as a share of what it has moved."""
    initial = dict(TinyLlama(SHAPE, seed=CONFIG.seed).named_parameters())
    losses = zip(got.losses, expected.losses, strict=True)
    assert got.parameters.keys() == expected.parameters.keys() == initial.keys()
    shares = [
        (got.parameters[name] - end).norm() / (end - initial[name]).norm()
        for name, end in expected.parameters.items()
    ]
    return max(abs(a / b - 1) for a, b in losses), max(share.item() for share in shares)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tier", "memory"), WAYS, ids=[f"{tier}-{memory}" for tier, memory in WAYS]
)
def test_run_is_that_of_hugging_face(
    tier: str, memory: str, device: torch.device, tmp_path: Path
) -> None:
    chosen = TIERS[tier].with_memory(memory)
    if slow_steps(tier, device):
        loss, moved = apart(stepped(chosen, 2), theirs(2))
    else:
        loss, moved = apart(ours(tmp_path, chosen, device), theirs(CONFIG.num_steps))
    assert loss < LOSS
    assert moved < MOVED
