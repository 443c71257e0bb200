"""A tier is a table from ops to providers, and a way to run the step. Nothing else differs.

V1 is what a good PyTorch user writes first; V2 is the fastest stock PyTorch; V3 uses our kernels;
V4 puts everything between two matrix products into their epilogues and prologues.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tinyllama.harness.machine.device import cannot
from tinyllama.model.config import ConfigError
from tinyllama.ops import OPS
from tinyllama.ops.stack import provider_of


@dataclass(frozen=True)
class StepPlan:
    """How a training step is run.

    compile: the loss and its backward go through torch.compile.
    capture: the whole step is captured once as a device graph and replayed.
    memory: "fast" saves for the backward pass whatever makes it faster; "selective" saves the input
        of a block and the output of its attention, and recomputes the rest; "small" saves only the
        inputs of blocks, and frees each gradient as soon as it is used.
    overlap: a block is updated while the backward pass computes the blocks below it; not with
        gradients that are clipped or accumulated, or in fp16, where an update must wait for all.
    """

    compile: bool = False
    capture: bool = False
    memory: str = "fast"
    overlap: bool = False

    def __str__(self) -> str:
        ways = [name for name in ("compile", "capture", "overlap") if getattr(self, name)]
        if self.memory != "fast":
            ways.append(f"{self.memory}-memory")
        return " + ".join(ways) or "eager"


@dataclass(frozen=True)
class Tier:
    """A named choice of providers.

    table: op name -> provider name.
    gpu, cpu: the fastest plan of this tier on a device of that kind, as measured.
    switches: parts of the tier by name -> the table entries they set; with a part switched off,
        its ops have the first tier's provider.
    """

    name: str
    title: str
    table: Mapping[str, str]
    gpu: StepPlan = StepPlan()
    cpu: StepPlan = StepPlan()
    switches: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def providers(self) -> dict[str, Callable[..., Any]]:
        """The callables of the table."""
        return {op: OPS[op][provider].call for op, provider in self.table.items()}

    def plan(self, device_type: str) -> StepPlan:
        """The plan used by default on a device type ("cuda" covers every GPU, or "cpu")."""
        return self.cpu if device_type == "cpu" else self.gpu

    def cannot_run(self, device: torch.device) -> str | None:
        """Why a provider of the table cannot run on a device; None when all can."""
        for op, provider in self.table.items():
            for capability in OPS[op][provider].requires:
                reason = cannot(capability, device)
                if reason:
                    return f"its {op} ({provider}) needs {capability}: {reason}"
        return None

    @property
    def interpreted(self) -> bool:
        """Whether a CPU can only interpret its kernels: correct, and far too slow to be timed."""
        return any("triton" in OPS[op][name].requires for op, name in self.table.items())

    @property
    def counts_on_host(self) -> bool:
        """Whether a provider of the table reads its step count on the host."""
        return any(OPS[op][name].counts_on_host for op, name in self.table.items())

    def without(self, *switches: str) -> "Tier":
        """This tier with parts switched off, "compile" and "capture" among them.

        Raises ConfigError for a switch that the tier does not have.
        """
        tier = self
        for switch in switches:
            if switch in ("compile", "capture"):
                off: dict[str, Any] = {switch: False}
                tier = replace(tier, gpu=replace(tier.gpu, **off), cpu=replace(tier.cpu, **off))
            elif switch in self.switches:
                back = {op: V1.table[op] for op in self.switches[switch]}
                tier = replace(tier, table={**tier.table, **back})
            else:
                names = [*self.switches, "compile", "capture"]
                raise ConfigError(
                    f"tier {self.name} has no switch {switch!r}: use one of {', '.join(names)}"
                )
        return replace(tier, name=f"{self.name}-no-{'-'.join(switches)}") if switches else self

    def with_plan(self, plan: str | None) -> "Tier":
        """This tier with its blocks in the launches of a plan, one of `tinyllama.ops.stack.
        provider_of`: "fused" (what the chip's table chooses), "single", "all", "none", or products
        such as "out+down"; None: as they are.

        Raises ConfigError for a tier whose blocks are not one op, and for an unknown plan.
        """
        if plan is None or plan == self.table.get("stack"):
            return self
        if "stack" not in self.table:
            raise ConfigError(
                f"plan {plan!r} is for blocks that are one op, which tier {self.name} with this "
                "memory mode has not: use tier v4 with memory fast, or no plan"
            )
        try:
            provider = provider_of(plan)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        tier = replace(self, name=f"{self.name}-{plan}", table={**self.table, "stack": provider})
        if plan != "single":
            return tier
        # As few launches as can be: one update, at the end.
        gpu, cpu = (replace(way, overlap=False) for way in (self.gpu, self.cpu))
        return replace(tier, gpu=gpu, cpu=cpu)

    def with_memory(self, memory: str) -> "Tier":
        """This tier with plans of this memory mode, one of `tinyllama.model.config.MEMORY`.

        Memory mode ``small`` is not captured: a graph's pool keeps more than the step's peak.
        Raises ConfigError if the tier has no such mode.
        """
        table = dict(self.table)
        if memory == "selective" and "block" not in table:
            raise ConfigError(
                f"memory selective needs a block that is one op, and tier {self.name} has "
                "none: use tier v3 or v4, or memory small"
            )
        if memory != "fast" and "block" in table:
            table["block"] = memory
        overlap = memory == "fast"
        if not overlap:
            table.pop("stack", None)  # which keeps all that its backward reads
        plans = [
            replace(plan, memory=memory, overlap=plan.overlap and overlap)
            for plan in (self.gpu, self.cpu)
        ]
        if memory == "small":
            plans = [replace(plan, capture=False) for plan in plans]
        return replace(self, table=table, gpu=plans[0], cpu=plans[1])


V1 = Tier(
    "v1",
    "PyTorch baseline",
    {
        "embedding": "torch",
        "rms_norm": "eager",
        "add_rms_norm": "eager",
        "qkv": "eager",
        "rope": "eager",
        "attention": "eager",
        "swiglu": "eager",
        "linear_cross_entropy": "torch",
        "adamw": "default",
    },
)

_V2_PARTS: dict[str, dict[str, str]] = {
    "norm": {"rms_norm": "torch", "add_rms_norm": "torch"},
    "qkv": {"qkv": "torch"},
    "attention": {"attention": "torch"},
    "swiglu": {"swiglu": "torch"},
    "adamw": {"adamw": "torch"},
}

V2 = Tier(
    "v2",
    "PyTorch with fused operations",
    {**V1.table, **{op: p for part in _V2_PARTS.values() for op, p in part.items()}},
    gpu=StepPlan(compile=True, capture=True),
    cpu=StepPlan(capture=True),  # no CPU can capture; compiling gains little there
    switches=_V2_PARTS,
)

V3 = Tier(
    "v3",
    "Triton kernels",
    {
        **V1.table,
        "rms_norm": "triton",
        "add_rms_norm": "triton",
        "qkv": "torch",
        "rope": "triton",
        "attention": "triton",
        "swiglu": "triton",
        "block": "triton",
        "linear_cross_entropy": "triton",
        "adamw": "triton",
    },
    gpu=StepPlan(capture=True),
    cpu=StepPlan(capture=True),  # no CPU can capture, and kernels are interpreted there
)

V4 = Tier(
    "v4",
    "Ultra-fused",
    {**V3.table, "embedding": "triton", "stack": "fused"},
    gpu=StepPlan(capture=True, overlap=True),
    cpu=StepPlan(capture=True, overlap=True),
)

TIERS: dict[str, Tier] = {tier.name: tier for tier in (V1, V2, V3, V4)}


def resolve(tier: str | Tier) -> Tier:
    """A tier by name. Raises ConfigError for one that does not exist."""
    if isinstance(tier, Tier):
        return tier
    if tier not in TIERS:
        raise ConfigError(f"tier {tier!r} does not exist: use one of {', '.join(TIERS)}")
    return TIERS[tier]
