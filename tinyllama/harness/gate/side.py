"""The benchmarks of a tree: which providers of which ops are compared, on which cases."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.registry import Registry
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.own import Own
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.op_contender import (
    Timed,
    loaded,
    passes_of,
    timed_dtype,
    untimed,
)
from tinyllama.harness.records.results import is_number

# By metric, the smallest slowdown that must not be called SAME. A shared host is noisier.
# Processes that run the same code differ by 4% in host time (docs/GATE.md).
ON_GPU = {DEVICE: 0.02, HOST: 0.12}
ON_CPU = {DEVICE: 0.10}
FURTHER = 0.10  # at least, of a timed case between the smallest and the largest


@dataclass(frozen=True)
class Benchmark:
    """What is compared under one name.

    timed: the argument of its subject. module: it runs this module and its imports; registered: and
    those of the module that registered the provider. slowdowns: metric -> the smallest slowdown
    that must not be called SAME; empty: the usual ones. factory: ``module:name`` of the subject,
    where it is not an op's.
    layouts: layout of inputs -> how many times as long as on contiguous ones a call may take.
    further: a timed case between the smallest and the largest, which is compared only where the
    op's own files differ. untimed: why its time would not count here; its results are verified.
    """

    name: str
    timed: Any
    module: str
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    factory: str = ""
    registered: str = ""
    layouts: Mapping[str, float] = field(default_factory=dict)
    further: bool = False
    untimed: str = ""


def usual_slowdowns(device: torch.device, stated: Mapping[str, float]) -> dict[str, float]:
    """The slowdowns of what states none: those given, else ours; on a CPU at least ours, which are
    above its noise."""
    if device.type != "cpu":
        return {**ON_GPU, **stated}
    return {metric: max(least, stated.get(metric, 0.0)) for metric, least in ON_CPU.items()}


def declared(
    device: torch.device,
    package: str,
    files: Sequence[str] = (),
    usual: Mapping[str, float] | None = None,
    own: Own | None = None,
) -> list[Benchmark]:
    """The benchmarks of a device: each provider of each op of the tree, or of its own ones. usual:
    `usual_slowdowns` of what a team states.

    Device time is of the largest timed case that the provider covers; host time, which a caller
    waits for where calls are short, of the smallest. Device time of the cases between these is
    `Benchmark.further`. On a CPU the smallest is timed alone. A provider with a backward of its own
    is timed on the op's slowest layout, too.
    """
    found = []
    named = loaded(package, tuple(files))[1]

    def place(module: str) -> str:
        """Its name, or in a repository of one's own the path of the file that it is."""
        return os.path.relpath(named[module]) if own and module in named else module

    def made(op: Op, provider: Provider, timed: Timed, stated: Mapping[str, float]) -> Benchmark:
        return Benchmark(
            _name(op, timed),
            timed,
            place(op.module),
            stated,
            registered=place(provider.module),
        )

    for op, provider, every in _every(device, package, files, own):
        slowdowns = _slowdowns(op, provider, device, usual or {})
        covered = [timed for timed in every if _left_out(op, timed, device) is None]
        for timed, metrics in _gated(covered, device):
            stated = {metric: slowdowns[metric] for metric in metrics}
            found.append(made(op, provider, timed, stated))
            if DEVICE in metrics and (laid_out := _laid_out(op, found[-1])):
                found.append(laid_out)
        for timed in covered[1:-1] if device.type != "cpu" else ():
            stated = {DEVICE: max(FURTHER, slowdowns[DEVICE])}
            found.append(replace(made(op, provider, timed, stated), further=True))
    return found


def _laid_out(op: Op, usual: Benchmark) -> Benchmark | None:
    """The benchmark of a case on the op's slowest layout; None for a provider that is composed of
    torch's functions: which layouts those copy is torch's decision."""
    layouts = getattr(op, "layouts", {})  # a base may be from before an op had these
    if not layouts or op[usual.timed.provider].derived is None:
        return None
    timed = replace(usual.timed, layout=next(iter(layouts)))
    slowdowns = {DEVICE: usual.slowdowns[DEVICE]}
    return replace(
        usual, name=_name(op, timed), timed=timed, slowdowns=slowdowns, layouts=dict(layouts)
    )


def left_out(
    device: torch.device, package: str, files: Sequence[str] = (), own: Own | None = None
) -> Counter[str]:
    """By reason, how many providers have no benchmark on a device."""
    why: Counter[str] = Counter()
    registry, chosen = _chosen(package, files, own)
    for name, providers in chosen.items():
        if not registry[name].timed:
            why[f"op {name} declares no timed cases: add timed=[Case(...)]"] += len(providers)
    for op, _, every in _every(device, package, files, own):
        reasons = [_left_out(op, timed, device) for timed in every]
        if None not in reasons:
            why[str(reasons[0])] += 1
    return why


def _chosen(
    package: str, files: Sequence[str], own: Own | None
) -> tuple[Registry, dict[str, list[Provider]]]:
    """All ops, and by name those of which benchmarks are made, with their providers."""
    registry, named = loaded(package, tuple(files))
    if own is not None:
        return registry, own.providers(registry, named)
    return registry, {op.name: list(op.providers.values()) for op in registry.values()}


def _every(
    device: torch.device, package: str, files: Sequence[str], own: Own | None
) -> Iterator[tuple[Op, Provider, list[Timed]]]:
    """Each provider of each op that is timed, on each of its timed cases."""
    dtype = "bf16" if device.type != "cpu" and cannot("bf16", device) is None else "fp32"
    registry, chosen = _chosen(package, files, own)
    for op, providers in ((registry[name], providers) for name, providers in chosen.items()):
        short, places = timed_dtype(op, dtype), range(len(op.timed))
        for provider in providers if op.timed else ():
            yield op, provider, [Timed(op.name, provider.name, place, short) for place in places]


def _gated(covered: Sequence[Timed], device: torch.device) -> list[tuple[Timed, list[str]]]:
    """Which of the timed cases that a provider covers are benchmarks, and the metrics of each."""
    if device.type == "cpu":
        return [(timed, [DEVICE]) for timed in covered[:1]]
    if len(covered) < 2:
        return [(timed, [DEVICE, HOST]) for timed in covered]
    return [(covered[-1], [DEVICE]), (covered[0], [HOST])]


def _slowdowns(
    op: Op, provider: Provider, device: torch.device, usual: Mapping[str, float]
) -> dict[str, float]:
    """The slowdowns that a provider states, else its op, else the usual ones.

    Raises ValueError for an unknown metric or an invalid slowdown.
    """
    for who, slowdowns in ((f"op {op.name!r}", op.slowdowns), (provider, provider.slowdowns)):
        for metric, share in slowdowns.items():
            if metric not in ON_GPU or not (is_number(share) and share > 0):
                raise ValueError(
                    f"{who}: slowdowns of {metric!r}: {share!r}: give {' or '.join(ON_GPU)} "
                    "a share above 0, as 0.02"
                )
    return usual_slowdowns(device, {**usual, **op.slowdowns, **provider.slowdowns})


def _left_out(op: Op, timed: Timed, device: torch.device) -> str | None:
    provider = op[timed.provider]
    reason = untimed(provider, device)
    if reason is None and provider.waits and device.type != "cpu":
        reason = "its calls wait for the device, or fill its queue: its time cannot be isolated"
    return reason or timed.case_of(op, provider).unsupported()


def _name(op: Op, timed: Timed) -> str:
    case = op.timed[timed.case]
    layout = "" if timed.layout == "contiguous" else f"-{timed.layout}"
    return f"{op.name}-{timed.provider}-{case}-{timed.dtype}{layout}/{passes_of(op)[-1]}"
