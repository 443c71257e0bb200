"""The stages of the published debugging journey, and a sixth: one model with one part broken."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tinyllama.harness.machine.parsed import tomllib
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V1, V3, StepPlan, Tier
from tinyllama.ops.block import PARTS, compose
from tinyllama.training.step import TrainStep
from tinyllama.workshop import strided


@dataclass(frozen=True)
class Parts:
    """What is right in a stage. initialised: the weights have the model's own distribution, not
    torch's default. dense: keys and values are copied to a dense last axis before attention.
    waits: the clock waits for the device. blas: SwiGLU's products are the BLAS library's, not one
    program's for each element. differentiable: autograd sees norms, attention and SwiGLU."""

    initialised: bool = True
    dense: bool = True
    waits: bool = True
    blas: bool = True
    differentiable: bool = True


@dataclass(frozen=True)
class Stage:
    """A table of stages.toml, which explains the fields."""

    number: int
    title: str
    parts: Parts
    check: str
    issue: str
    lesson: str
    fix: str
    fault: str | None = None
    loss: str = "7.0"
    speed: str = "-"
    memory: str = "~282 MB"

    @property
    def fixed(self) -> "Stage":
        """This stage with its fault removed."""
        if self.fault is None:
            return self
        right: dict[str, Any] = {self.fault: True}
        return replace(self, parts=replace(self.parts, **right), fault=None)


def _stages() -> dict[int, Stage]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    stages = {}
    for number, table in enumerate(tomllib.loads(text)["stage"], 1):
        parts = Parts(**dict.fromkeys(table.pop("wrong"), False))
        stages[number] = Stage(number=number, parts=parts, **table)
    return stages


STAGES = _stages()


def tier_of(parts: Parts, device: torch.device) -> Tier:
    """The providers of a stage. A CPU would interpret kernels, so there each op has its eager
    provider; layout, initialisation and lost gradients are the same."""
    if device.type == "cpu":
        return replace(V1, name="stage", table=V1.table)
    table = {op: name for op, name in V3.table.items() if op != "block"}
    table["swiglu"] = "triton" if parts.blas else "naive"
    return replace(V3, name="stage", table=table, gpu=StepPlan(capture=True))


def attention_of(parts: Parts, device: torch.device) -> Callable[..., torch.Tensor]:
    """Attention on expanded keys and values: in the strided kernel, or on a CPU in torch."""
    if device.type != "cpu":
        return partial(strided.attention, dense=parts.dense)
    eager = V1.providers()["attention"]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (strided.expanded(x, q.shape[2]) for x in (k, v))
        if parts.dense:
            k, v = k.contiguous(), v.contiguous()
        output: torch.Tensor = eager(q, k, v)
        return output

    return attend


def forward_only(call: Callable[..., Any]) -> Callable[..., Any]:
    """An op as its kernels alone compute it: autograd does not see it."""

    def undifferentiated(*args: Any, **params: Any) -> Any:
        with torch.no_grad():
            return call(*args, **params)

    return undifferentiated


KERNELS = ("rms_norm", "add_rms_norm", "attention", "swiglu")  # of the published program


def model_of(parts: Parts, config: ModelConfig, device: torch.device, seed: int) -> TinyLlama:
    """The one model, on a device, with the parts that are wrong replaced."""
    model = TinyLlama(config, tier_of(parts, device), seed=seed)
    if not parts.initialised:
        default_initialise(model, seed)
    table = {**model.tier.providers(), "attention": attention_of(parts, device)}
    if not parts.differentiable:
        table |= {op: forward_only(table[op]) for op in KERNELS}
    block = compose({op: table[op] for op in PARTS})
    layers: list[Any] = list(model.layers)
    for layer in layers:
        layer.compute = block
    model.norm = table["rms_norm"]
    return model.to(device)


@torch.no_grad()
def default_initialise(model: TinyLlama, seed: int) -> None:
    """Give matrices what `nn.Embedding` and `nn.Linear` draw where nothing else is said."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter is model.embedding:
            nn.init.normal_(parameter, generator=generator)
        elif parameter.dim() > 1:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)


def step_of(
    parts: Parts,
    config: ModelConfig,
    train: TrainConfig,
    device: torch.device,
    only: tuple[str, ...] = (),
) -> TrainStep:
    """A stage's step. On a GPU it is captured: there the host would otherwise take longer than the
    kernels, and hide what they cost. only: parameters that are updated; none: those that get a
    gradient."""
    model = model_of(parts, config, device, train.seed)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(not only or name in only)
    if not parts.differentiable:
        only = ("embedding",)
    # torch's optimizers pass over parameters without a gradient; ours refuses them
    learning = [named[name] for name in only] if only else None
    return TrainStep(model, train, learning=learning)
