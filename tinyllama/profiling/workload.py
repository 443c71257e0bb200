"""The training step that is profiled, in a form that another process can read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import torch

from tinyllama.harness.machine.device import synchronize, usable_device
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import Tier, resolve
from tinyllama.training.step import TrainStep, products


@dataclass(frozen=True)
class Workload:
    """A tier, with parts switched off, on random tokens. capture: False runs the step uncaptured,
    so that tools see its operators; ``train.num_steps``: the steps profiled after the warm-up."""

    model: ModelConfig
    train: TrainConfig
    tier: str = "v1"
    without: list[str] = field(default_factory=list)
    memory: str = "fast"
    plan: str | None = None
    capture: bool = True
    device: str | None = None

    def dump(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def load(cls, text: str) -> "Workload":
        return msgspec.json.decode(text, type=cls)

    def on(self) -> torch.device:
        return usable_device(self.device)

    def chosen_tier(self) -> Tier:
        """The tier with its options. Raises ConfigError for options that do not fit."""
        tier = resolve(self.tier).without(*self.without)
        return tier.with_memory(self.memory).with_plan(self.plan)

    @contextmanager
    def step(
        self, *, capture: bool | None = None
    ) -> Iterator[tuple[TrainStep, Callable[[], None]]]:
        """The step, ready, and a function that runs it on a batch and waits for it."""
        device, tier, config = self.on(), self.chosen_tier(), self.train
        if not (self.capture if capture is None else capture):
            tier = tier.without("capture")
        with products(config.precision, device):
            model = TinyLlama(self.model, tier, seed=config.seed).to(device)
            step = TrainStep(model, config)
            step.prepare()
            shape = (config.samples_per_step, config.seq_len + 1)
            generator = torch.Generator().manual_seed(config.seed)
            tokens = torch.randint(self.model.vocab_size, shape, generator=generator).to(device)

            def run_step() -> None:
                step(tokens)
                synchronize(device)

            yield step, run_step
