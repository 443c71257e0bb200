"""Training steps of any tier, for the specifications that compare them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tinyllama.config import ModelConfig, TrainConfig
from tinyllama.model import TinyLlama
from tinyllama.step import TrainStep, products
from tinyllama.tiers import StepPlan, Tier

SHAPE = ModelConfig(
    hidden_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=101
)
BATCH = {"batch_size": 3, "seq_len": 29}


def tokens(step: int, *, vocab: int = SHAPE.vocab_size, seed: int = 0) -> torch.Tensor:
    """Random tokens (B, T + 1) of a step."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    shape = (BATCH["batch_size"], BATCH["seq_len"] + 1)
    return torch.randint(vocab, shape, generator=generator)


@dataclass
class Run:
    """What a few steps gave: losses, and after the last step gradients and parameters."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]


def run(
    tier: str | Tier,
    device: torch.device,
    *,
    steps: int = 1,
    precision: str = "fp32",
    plan: StepPlan | None = None,
    seed: int = 0,
    learning_rate: float = 1e-3,
) -> Run:
    """Train from the weights of a seed, the way the tier's plan (or the given one) runs."""
    model = TinyLlama(SHAPE, tier, seed=seed).to(device)
    config = TrainConfig(**BATCH, precision=precision, learning_rate=learning_rate)
    with products(precision, device):
        step = TrainStep(model, config, plan)
        step.prepare()
        losses = []
        for index in range(steps):
            batch = tokens(index, seed=seed).to(device)
            losses.append(step(batch[:, :-1], batch[:, 1:]).item())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    return Run(losses, grads, params)


def oracle(device: torch.device, *, seed: int = 0, moved: int | None = None) -> Run:
    """The gradients of the first step in float64, by the references; ``moved`` perturbs the
    weights by float32's rounding."""
    model = TinyLlama(SHAPE, "v1", seed=seed).double().to(device)
    if moved is not None:
        generator = torch.Generator().manual_seed(moved)
        with torch.no_grad():
            for parameter in model.parameters():
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
                parameter.mul_(1 + torch.finfo(torch.float32).eps * draw.to(device))
    batch = tokens(0, seed=seed).to(device)
    loss = model.loss(batch[:, :-1], batch[:, 1:])
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Run([loss.item()], grads, {})
