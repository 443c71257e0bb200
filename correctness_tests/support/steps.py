"""Training steps of any tier, for the specifications that compare them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan, Tier, resolve
from tinyllama.training.step import TrainStep, products

SHAPE = ModelConfig(
    hidden_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=101
)
BATCH: dict[str, Any] = {"batch_size": 2, "seq_len": 21}  # kernels are interpreted on a CPU
RATES = (1e-4, 1e-3, 3e-3, 1e-3, 0.0, 2e-3, 1e-3, 3e-4, 1e-4, 1e-4)  # of ten steps


def tokens(
    step: int, *, vocab: int = SHAPE.vocab_size, seed: int = 0, accumulate: int = 1
) -> torch.Tensor:
    """Random tokens (B, T + 1) of a step, B for each micro-batch."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    shape = (BATCH["batch_size"] * accumulate, BATCH["seq_len"] + 1)
    return torch.randint(vocab, shape, generator=generator)


@dataclass
class Run:
    """What a few steps gave: losses, and after the last step gradients and parameters.

    grads: what the last update was given; empty where a captured step has freed them.
    norms: of the gradients of each step, where they are clipped. state: the optimizer's.
    """

    losses: list[float]
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def run(
    tier: str | Tier,
    device: torch.device,
    *,
    steps: int = 1,
    precision: str = "fp32",
    plan: StepPlan | None = None,
    seed: int = 0,
    learning_rate: float = 1e-3,
    rates: Sequence[float] = (),
    **settings: Any,
) -> Run:
    """Train from the weights of a seed, the way the tier's plan (or the given one) runs.

    rates: a learning rate for each step. settings: more of a `TrainConfig`.
    """
    model = TinyLlama(SHAPE, tier, seed=seed).to(device)
    config = TrainConfig(**BATCH, precision=precision, learning_rate=learning_rate, **settings)
    named = dict(model.named_parameters())
    seen: dict[str, torch.Tensor] = {}
    with products(precision, device):
        step = TrainStep(model, config, plan)
        if precision == "fp16":  # a few tokens have large gradients; V4 keeps them times 1 / rms(x)
            step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**10})
        step.prepare(warm_up=0 if slow_steps(tier, device) else 3)
        losses, norms = [], []
        for index in range(steps):
            if rates:
                step.optimizer.set_lr(rates[index])
            if index == steps - 1 and step.plan.memory == "small":  # frees what it has used
                for name, p in named.items():
                    p.register_hook(lambda grad, name=name: seen.update({name: grad.clone()}))
            batch = tokens(index, seed=seed, accumulate=config.accumulate).to(device)
            losses.append(step(batch[:, :-1], batch[:, 1:]).item())
            if step.norm is not None:
                norms.append(step.norm.item())
    grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
    params = {n: p.detach().clone() for n, p in named.items()}
    state = {n: t.clone() for n, t in step.optimizer.tensors().items()}
    return Run(losses, grads or seen, params, norms, state)


def oracle(
    device: torch.device,
    *,
    seed: int = 0,
    moved: int | None = None,
    shape: ModelConfig = SHAPE,
    batch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Run:
    """The gradients of the first step in float64, by the references; ``moved`` perturbs the
    weights by float32's rounding. batch: inputs and targets in the place of those of `tokens`."""
    model = TinyLlama(shape, "v1", seed=seed).double().to(device)
    if moved is not None:
        generator = torch.Generator().manual_seed(moved)
        with torch.no_grad():
            for parameter in model.parameters():
                draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
                parameter.mul_(1 + torch.finfo(torch.float32).eps * draw.to(device))
    drawn = tokens(0, seed=seed)
    loss = model.loss(*(half.to(device) for half in batch or (drawn[:, :-1], drawn[:, 1:])))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Run([loss.item()], grads, {})


def assert_same_training(got: Run, expected: Run, rel: float) -> None:
    """Losses, norms, the last gradients, and parameters as far as they have moved."""
    assert got.losses == pytest.approx(expected.losses, rel=rel)
    if got.norms:
        assert got.norms == pytest.approx(expected.norms, rel=10 * rel)
    assert got.grads.keys() == expected.grads.keys()
    start = dict(TinyLlama(SHAPE).named_parameters())
    for name, exact in expected.grads.items():
        assert (got.grads[name] - exact).norm() <= 100 * rel * exact.norm(), f"gradient of {name}"
    for name, exact in expected.params.items():
        moved = (exact - start[name].to(exact.device)).norm()
        # Adam divides by the gradient's own size, so rounding shows most where it is small.
        assert (got.params[name] - exact).norm() <= 2000 * rel * moved, name


def assert_equal_bits(got: Run, expected: Run) -> None:
    """Losses, parameters and the optimizer's state."""
    assert got.losses == expected.losses
    for mine, theirs in ((got.params, expected.params), (got.state, expected.state)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


def slow_steps(tier: str | Tier, device: torch.device) -> bool:
    """Whether kernels are interpreted: seconds a step, so few of them are taken."""
    return resolve(tier).interpreted and device.type == "cpu"


def leave_to_gpu(tier: str | Tier, device: torch.device) -> None:
    """Skip, where kernels are interpreted, what says nothing about kernels."""
    if slow_steps(tier, device):
        pytest.skip("interpreted kernels take seconds a step: run with this tier on a GPU")


def must_capture(tier: str | Tier, device: torch.device) -> None:
    """Skip the test where a step of this tier cannot be captured."""
    tier = resolve(tier)
    reason = cannot("capture", device) or tier.cannot_run(device)
    if reason is None and tier.counts_on_host:
        reason = "the optimizer of this tier counts its steps on the host"
    if reason:
        pytest.skip(f"capture: {reason}")
