"""The training step that is profiled, in a form that another process can read."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch

from tinyllama.harness.machine.device import default_device, synchronize
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import resolve
from tinyllama.training.step import TrainStep, products


@dataclass(frozen=True)
class Workload:
    """A tier, with parts switched off, on random tokens. capture: False for the step that tools
    can see into; steps: how many are profiled, after the warm-up."""

    model: ModelConfig
    train: TrainConfig
    tier: str = "v1"
    without: list[str] = field(default_factory=list)
    memory: str = "fast"
    plan: str | None = None
    capture: bool = True
    device: str | None = None

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "Workload":
        given = json.loads(text)
        model, train = ModelConfig(**given.pop("model")), TrainConfig(**given.pop("train"))
        return cls(model, train, **given)

    def on(self) -> torch.device:
        return torch.device(self.device) if self.device else default_device()

    @contextmanager
    def step(
        self, *, capture: bool | None = None
    ) -> Iterator[tuple[TrainStep, Callable[[], None]]]:
        """The step, ready, and a function that runs it on the next batch and waits for it."""
        device = self.on()
        tier = resolve(self.tier).without(*self.without).with_memory(self.memory)
        tier = tier.with_plan(self.plan)
        if not (self.capture if capture is None else capture):
            plans = {name: replace(getattr(tier, name), capture=False) for name in ("gpu", "cpu")}
            tier = replace(tier, gpu=plans["gpu"], cpu=plans["cpu"])
        config = self.train
        with products(config.precision, device):
            model = TinyLlama(self.model, tier, seed=config.seed).to(device)
            made = TrainStep(model, config)
            made.prepare()
            shape = (config.samples_per_step, config.seq_len + 1)
            generator = torch.Generator().manual_seed(config.seed)
            tokens = torch.randint(self.model.vocab_size, shape, generator=generator).to(device)

            def once() -> None:
                made(tokens)
                synchronize(device)

            yield made, once
