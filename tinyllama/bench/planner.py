"""What a training step would take on many GPUs: computed from declared counts and records of ops.

The step is that of tier v3 in bf16 autocast: its ops, each as often as the model calls it. An op's
time is its time on the roofline (declared operations and bytes, at the measured ceilings), divided
by the share of the roofline that the op reaches when it is timed alone; the share is interpolated
between the two recorded shapes that are next in size. Communication is bytes divided by link speeds
that the caller gives. Nothing is fitted to the time of any step; `points` compares the planner with
recorded steps.

Not counted: gaps between launches, the wait for the slowest rank, and the slowdown of compute while
links are busy. Tensor and pipeline parallelism are not planned, because neither was measured.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyllama.harness import Tensor
from tinyllama.harness.declare.specs import shape_of
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.records.entries import CeilingEntry, OpEntry, ScalingEntry, StepEntry, Timed
from tinyllama.harness.records.results import Record
from tinyllama.model.config import WORKLOADS, ModelConfig
from tinyllama.model.tiers import V3
from tinyllama.ops import OPS
from tinyllama.ops.block.passes import AFTER, ATTENDED, BEFORE

FP32, BF16 = 4, 2  # bytes
# Of the elements that a norm reads and writes half are of the residual stream, which stays float32.
NORM = (FP32 + BF16) / 2
OTHER = 64 * 2**20  # bytes that stay allocated and are neither (docs/model.md)
STATE = 3 * FP32  # bytes a parameter: itself, and both moments of AdamW

MODES = ("fast", "selective")

# Published shapes (Touvron et al., arXiv 2307.09288; Llama team, arXiv 2407.21783, table 3). This
# model's projection is its embedding, so it has V D parameters fewer.
SHAPES: dict[str, ModelConfig] = {
    name: ModelConfig(
        hidden_dim=d, num_layers=n, num_heads=h, num_kv_heads=g, ffn_dim=f, vocab_size=v
    )
    for name, (d, n, h, g, f, v) in {
        "7B": (4096, 32, 32, 32, 11008, 32000),
        "8B": (4096, 32, 32, 8, 14336, 128256),
        "13B": (5120, 40, 40, 40, 13824, 32000),
        "70B": (8192, 80, 64, 8, 28672, 128256),
        "405B": (16384, 126, 128, 8, 53248, 128256),
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes a second of one GPU in one direction, as given: to those of its node, and to others.

    A ring over several nodes passes through all network cards of a node at the same time.
    """

    per_node: int
    inside: float
    between: float

    def ring(self, gpus: int) -> float:
        """Bytes a second that a ring of so many GPUs passes on at each of them."""
        if gpus <= self.per_node:
            return self.inside
        return min(self.inside, self.per_node * self.between)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A step on some GPUs: seconds, and bytes of each GPU. exposed: the communication that nothing
    hides. passing: the larger of the activations and of the gradients, which replace them; both
    where buckets hold the gradients from the start."""

    way: str
    memory: str  # of `tinyllama.model.tiers.StepPlan`
    gpus: int
    tokens: int  # of all GPUs
    forward: float
    backward: float
    optimizer: float
    communication: float
    exposed: float
    state: float
    passing: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer + self.exposed

    @property
    def bytes(self) -> float:
        return self.state + self.passing + OTHER

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Rates:
    """The timings of V3's ops, alone on one GPU in bf16, of the newest record that has them."""

    def __init__(self, records: Iterable[Record]) -> None:
        providers = {**V3.table, "linear": "triton"}
        of_ops = [r for r in records if r.group == "ops-bf16" and r.complete and r.of(OpEntry)]
        if not of_ops:
            raise UsageError(
                "no record has timings of the ops in bf16: make one with "
                "pytest perf_tests --groups ops-bf16 --record, or name another --results-dir"
            )
        self.record = max(of_ops, key=lambda record: record.date)
        self._entries = [
            entry
            for entry in self.record.of(OpEntry)
            if entry.ran and providers.get(entry.op) == entry.provider
        ]
        of_ceilings = {entry.name: entry for entry in self.record.of(CeilingEntry)}
        self.copy = of_ceilings["ceiling/copy"].bytes_per_second or math.nan
        self.product = of_ceilings["ceiling/product-bf16"].flops_per_second or math.nan

    def seconds(self, op: str, size: float, dims: Mapping[str, Any]) -> tuple[float, float]:
        """Of one forward and of one backward pass in this shape; ``size``: bytes an element."""
        passes: list[float] = []
        for which, costs in (("forward", ("forward",)), ("forward+backward", tuple(OPS[op].bytes))):
            flops = sum(OPS[op].flops[cost](**dims) for cost in costs)
            moved = sum(OPS[op].bytes[cost](size, **dims) for cost in costs)
            least = self._roofline(flops, moved)
            passes.append(least / self._share(op, which, dims, least))
        forward, total = passes
        return forward, max(total - forward, 0.0)

    def _roofline(self, flops: float, moved: float) -> float:
        return max(flops / self.product, moved / self.copy)

    def _share(self, op: str, which: str, dims: Mapping[str, Any], least: float) -> float:
        """The share of the roofline that an op reaches in a shape whose roofline time is ``least``
        seconds; 1 for an op that is not timed alone. If two or more recorded shapes have heads
        of this width, only those are used."""
        timed = [e for e in self._entries if e.op == op and e.passes == which]
        alike = [e for e in timed if re.search(rf"K{dims.get('K')}(?!\d)", e.case)]
        recorded = sorted(
            (math.log(least), least / e.time)
            for e in (alike if len(alike) > 1 else timed)
            for least in [self._roofline(e.flops or 0.0, e.bytes or 0.0)]
        )
        if not recorded:
            return 1.0
        at, shares = zip(*recorded, strict=True)
        return float(np.interp(math.log(least), at, shares))


@dataclass(frozen=True)
class Work:
    """A model and the part of a batch that one GPU has."""

    model: ModelConfig
    batch_size: int
    seq_len: int

    @property
    def dims(self) -> dict[str, int]:
        return self.model.dims(self.batch_size, self.seq_len)

    def ops(self) -> Iterator[tuple[str, int, float, dict[str, int]]]:
        """Each op of V3, how often a step calls it, its bytes an element, and its sizes."""
        layers, dims = self.model.num_layers, self.dims
        w_o = {**dims, "D": dims["Q"], "F": dims["D"]}  # x (N D), w (F D)
        w_down = {**dims, "D": dims["F"], "F": dims["D"]}
        for op, count, size, sizes in (
            ("embedding", 1, FP32, dims),
            ("rms_norm", layers + 1, NORM, dims),
            ("qkv", layers, BF16, dims),
            ("rope", layers, BF16, dims),
            ("attention", layers, BF16, dims),
            ("linear", layers, BF16, w_o),
            ("add_rms_norm", layers, NORM, dims),
            ("swiglu", layers, BF16, dims),
            ("linear", layers, BF16, w_down),
            ("linear_cross_entropy", 1, BF16, dims),
        ):
            yield op, count, size, {name: sizes[name] for name in OPS[op].cases[0].dims}

    def seconds(self, rates: Rates, memory: str) -> tuple[float, float]:
        """Forward and backward; selective memory recomputes all of a block but attention."""
        forward = backward = again = 0.0
        for op, count, size, dims in self.ops():
            there, back = rates.seconds(op, size, dims)
            forward, backward = forward + count * there, backward + count * back
            again += count * there if count > 1 and op != "attention" else 0.0
        rounding = self.model.num_layers * self.layer * (FP32 + BF16) / rates.copy
        again += rounding
        return forward + rounding, backward + (again if memory == "selective" else 0.0)

    def activations(self, memory: str) -> float:
        """Bytes that the blocks keep for the backward pass (weights in bf16 among them, in fast
        memory), and what the loss does."""

        def size(name: str, declared: Tensor) -> int:
            wide = name == "sum" or declared.dtype is not None or declared.dtype_of is not None
            return (FP32 if wide else BF16) * math.prod(shape_of(declared.axes, self.dims))

        inputs = FP32 * self.dims["N"] * self.dims["D"]
        saved, weights = {**BEFORE, **ATTENDED, **AFTER}, BF16 * self.layer
        if memory == "selective":
            saved, weights = ATTENDED, 0
        block = inputs + sum(size(*item) for item in saved.items()) + weights
        return self.model.num_layers * block + 3 * inputs

    @property
    def layer(self) -> int:
        """Parameters of a block."""
        embedding = self.model.vocab_size * self.model.hidden_dim
        return (self.model.parameters - embedding - self.model.hidden_dim) // self.model.num_layers


def plans(work: Work, gpus: int, links: Links, rates: Rates) -> list[Plan]:
    """The step on several GPUs, each with this work: all parameters on each, or shards (FSDP2)."""
    copies = [_plan(work, gpus, links, rates, memory, False) for memory in MODES]
    return copies + [_plan(work, gpus, links, rates, m, True) for m in MODES if gpus > 1]


def _plan(work: Work, gpus: int, links: Links, rates: Rates, memory: str, sharded: bool) -> Plan:
    model = work.model
    forward, backward = work.seconds(rates, memory)
    mine = model.parameters / gpus if sharded else float(model.parameters)
    speed, passed = links.ring(gpus), (gpus - 1) / gpus * FP32
    once = passed * model.parameters / speed  # all parameters gathered, or gradients scattered
    activations, buckets = work.activations(memory), gpus > 1 and not sharded
    embedding, layer = model.vocab_size * model.hidden_dim, work.layer
    # The embedding is read first and last: nothing is left to hide the reduction of its gradient.
    ends = 2 * passed * embedding / speed
    exposed, gathered = max(2 * once - backward, ends), 0.0
    if sharded:
        first = passed * layer / speed  # hidden by nothing: the first block's, in both passes
        exposed = max(once - forward, first) + max(2 * once - backward, ends + first)
        # The embedding and its gradient, a block and its gradient, and the next block.
        gathered = FP32 * (2.0 * embedding + 3 * layer)
    return Plan(
        way="sharded" if sharded else "data parallel",
        memory=memory,
        gpus=gpus,
        tokens=gpus * work.batch_size * work.seq_len,
        forward=forward,
        backward=backward,
        optimizer=rates.seconds("adamw", FP32, {"P": (round(mine),)})[0],
        communication=(3 if sharded else 2) * once,
        exposed=exposed,
        state=STATE * mine + gathered,
        passing=activations + FP32 * mine if buckets else max(activations, FP32 * mine),
    )


@dataclass(frozen=True)
class Point:
    """A step that was recorded, and what the planner says of it."""

    workload: str
    recorded_seconds: float
    recorded_bytes: float
    plan: Plan

    @property
    def time_error(self) -> float:
        return self.plan.seconds / self.recorded_seconds - 1

    @property
    def memory_error(self) -> float:
        return self.plan.bytes / self.recorded_bytes - 1


def points(records: Iterable[Record]) -> list[Point]:
    """Each workload's newest recorded step of V3 in bf16, on one GPU and on several; the planner
    does not use it. The speed of the links is the one that the record of several GPUs measured.
    """
    records = sorted(records, key=lambda record: record.date)
    rates, newest = Rates(records), dict[str, StepEntry]()
    several: dict[str, ScalingEntry] = {}
    for record in records:
        for entry in record.of(StepEntry):
            if (entry.contender, entry.precision) == ("v3", "bf16") and entry.ran:
                newest[entry.workload] = entry
        for scaled in record.of(ScalingEntry) if record.device == rates.record.device else ():
            ours = scaled.contender in ("v3", "v3-shards") and scaled.precision == "bf16"
            if ours and scaled.ran and scaled.ranks > 1:
                several[f"{scaled.workload}, {scaled.ranks} GPUs, {scaled.case}"] = scaled
    alone = Links(per_node=1, inside=math.inf, between=math.inf)
    compared = []
    for name, workload in WORKLOADS.items():
        if name in newest:
            work = Work(workload.model, workload.batch_size, workload.seq_len)
            compared.append(_point(name, newest[name], _plan(work, 1, alone, rates, "fast", False)))
    for name, scaled in several.items():
        workload, gpus = WORKLOADS[scaled.workload], scaled.ranks
        links = Links(per_node=gpus, inside=scaled.link_bytes_per_second or 0.0, between=math.inf)
        work = Work(workload.model, scaled.batch_size // gpus, workload.seq_len)
        shards = scaled.contender.endswith("shards")
        compared.append(_point(name, scaled, _plan(work, gpus, links, rates, "fast", shards)))
    return compared


def _point(name: str, entry: Timed, plan: Plan) -> Point:
    return Point(name, entry.time, float(entry.peak_bytes or math.nan), plan)
