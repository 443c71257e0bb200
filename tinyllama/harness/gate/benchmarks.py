"""The benchmarks of a comparison: what each side declares, and which of it both have."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.check.cases import elements
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.registry import Registry
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.snapshots import module_file
from tinyllama.harness.gate.waivers import Waivers
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.measure.op_contender import (
    Timed,
    declared_by,
    loaded,
    passes_of,
    timed_dtype,
    untimed,
)
from tinyllama.harness.records.results import is_number
from tinyllama.harness.records.verdict import Outcome, Verdict

BASE, CANDIDATE = "base", "candidate"  # the names of the sides


@dataclass(frozen=True)
class TeamOps:
    """The ops of a repository that is not the harness's.

    files: paths and patterns relative to the root of a tree, as pytest expands them; each side has
    its own files of these. modules: of entry points. names: of the only ops that are compared;
    empty: of all. version: of the project; waivers expire by it.
    """

    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    version: str = "0"

    def paths(self, root: Path) -> tuple[str, ...]:
        """The files of ops that a tree has, as absolute paths."""
        matches = (glob.glob(pattern, root_dir=root, recursive=True) for pattern in self.files)
        paths = (str(root / name) for names in matches for name in sorted(names))
        return tuple(dict.fromkeys(path for path in paths if os.path.isfile(path)))

    def providers(self, registry: Registry, named: Mapping[str, str]) -> dict[str, list[Provider]]:
        """By op, the providers that are benchmarks. named: the file of each module."""
        declared = declared_by(registry, {*named, *self.modules})
        return {
            op: providers
            for op, providers in declared.items()
            if not self.names or op in self.names
        }


@dataclass(frozen=True)
class Registered:
    """What is gated.

    package: whose ops are loaded, and are benchmarks unless ``team_ops`` says which are. factory:
    ``module:name`` of a function that gives the further benchmarks of a device; empty: there are
    none. modules: those that time the further benchmarks; both sides run the judge's files of them.
    """

    package: str
    factory: str = ""
    modules: tuple[str, ...] = ()
    team_ops: TeamOps | None = None


def strays(root: Path) -> list[str]:
    """The files of loaded modules that a tree has too, and that were not loaded from it: an
    installed copy, or the other side's."""
    files = []
    for name, module in list(sys.modules.items()):
        ours, file = module_file(root, name), getattr(module, "__file__", None)
        if ours is not None and file and Path(file).resolve() != ours.resolve():
            files.append(file)
    return sorted(files)


# -- what a side declares -------------------------------------------------------------------------

# By metric, the smallest slowdown that must not be called SAME. A shared host is noisier.
# Processes that run the same code differ by 4% in host time.
ON_GPU = {DEVICE: 0.02, HOST: 0.12}
ON_CPU = {DEVICE: 0.10}
DERIVED_BYTES = 2**26  # of the inputs of a case that no op names
FURTHER = 0.10  # at least, of a timed case between the smallest and the largest


@dataclass(frozen=True)
class Benchmark:
    """What is compared under one name.

    timed: the argument of its subject. module: it runs this module and its imports; registered: and
    those of the module that registered the provider. slowdowns: metric -> the smallest slowdown
    that must not be called SAME; empty: the usual ones. factory: ``module:name`` of the subject,
    where it is not an op's. further: a timed case between the smallest and the largest, or a second
    layout, which is compared only where the op's own files differ. untimed: why its time would not
    count here; its results are verified. layout_bar: how many times as long as on contiguous inputs
    it may take (`Op.layouts`); 0: there is no bar. new: the base lacks it.
    """

    name: str
    timed: Any
    module: str
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    factory: str = ""
    registered: str = ""
    further: bool = False
    untimed: str = ""
    layout_bar: float = 0.0
    new: bool = False


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
    team_slowdowns: Mapping[str, float] | None = None,
    team_ops: TeamOps | None = None,
) -> list[Benchmark]:
    """The benchmarks of a device: each provider of each op of the tree, or in its own ones.
    team_slowdowns: what a team states in its pyproject.toml, by metric; see `usual_slowdowns`.

    Device time is of the largest timed case that the provider covers; host time, which a caller
    waits for where calls are short, of the smallest. Device time of the cases between these is
    `Benchmark.further`. On a CPU the smallest is timed alone. A provider with a backward of its own
    is timed on the op's layouts, too. One that cannot be timed has a benchmark without any.
    """
    benchmarks = []
    named = loaded(package, tuple(files))[1]

    def place(module: str) -> str:
        """Its name, or in a repository of one's own the path of the file that it is."""
        return os.path.relpath(named[module]) if team_ops and module in named else module

    def benchmark_of(
        op: Op, provider: Provider, timed: Timed, stated: Mapping[str, float]
    ) -> Benchmark:
        return Benchmark(
            _name(op, timed),
            timed,
            place(op.module),
            stated,
            registered=place(provider.module),
        )

    for op, provider, cases in _provider_cases(device, package, files, team_ops):
        slowdowns = _slowdowns(op, provider, device, team_slowdowns or {})
        covered = [timed for timed in cases if _not_timed(op, timed, device) is None]
        for timed, metrics in _gated(covered, device):
            stated = {metric: slowdowns[metric] for metric in metrics}
            benchmarks.append(benchmark_of(op, provider, timed, stated))
            if DEVICE in metrics:
                benchmarks += _laid_out(op, benchmarks[-1])
        for timed in covered[1:-1] if device.type != "cpu" else ():
            stated = {DEVICE: max(FURTHER, slowdowns[DEVICE])}
            benchmarks.append(replace(benchmark_of(op, provider, timed, stated), further=True))
        if not covered:
            reason = str(_not_timed(op, cases[0], device))
            stands = replace(benchmark_of(op, provider, cases[0], {}), untimed=reason)
            benchmarks.append(replace(stands, name=f"{op.name}-{provider.name}/results"))
    return benchmarks


def _laid_out(op: Op, benchmark: Benchmark) -> Iterator[Benchmark]:
    """The benchmarks of a case on the op's layouts, of which all but the slowest are further ones.
    There are none for a provider that is composed of torch's functions: which layouts those copy is
    torch's decision."""
    layouts = getattr(op, "layouts", {})  # a base may be from before an op had these
    if op[benchmark.timed.provider].derived is None:
        return
    for place, (layout, bar) in enumerate(layouts.items()):
        timed, slowdown = replace(benchmark.timed, layout=layout), benchmark.slowdowns[DEVICE]
        slowdown = max(FURTHER, slowdown) if place else slowdown
        laid_out = replace(benchmark, name=_name(op, timed), timed=timed, further=place > 0)
        yield replace(laid_out, slowdowns={DEVICE: slowdown}, layout_bar=bar)


def _chosen(
    package: str, files: Sequence[str], team_ops: TeamOps | None
) -> tuple[Registry, dict[str, list[Provider]]]:
    """All ops, and by name those of which benchmarks are made, with their providers."""
    registry, named = loaded(package, tuple(files))
    for op in registry.values() if team_ops is not None else ():
        op.timed = op.timed or [derived_case(op)]
    if team_ops is not None:
        return registry, team_ops.providers(registry, named)
    return registry, {op.name: list(op.providers.values()) for op in registry.values()}


def _provider_cases(
    device: torch.device, package: str, files: Sequence[str], team_ops: TeamOps | None
) -> Iterator[tuple[Op, Provider, list[Timed]]]:
    """Each provider of each op that is timed, on each of its timed cases."""
    dtype = "bf16" if device.type != "cpu" and cannot("bf16", device) is None else "fp32"
    registry, chosen = _chosen(package, files, team_ops)
    for op, providers in ((registry[name], providers) for name, providers in chosen.items()):
        short, places = timed_dtype(op, dtype), range(len(op.timed))
        for provider in providers if op.timed else ():
            yield op, provider, [Timed(op.name, provider.name, place, short) for place in places]


def derived_case(op: Op) -> Case:
    """The case that is timed where an op names none: its largest, with the first axis of its inputs
    doubled until they have `DERIVED_BYTES` in float32, as far as `Op.fits` allows."""
    case = max(op.cases, key=lambda candidate: elements(op, candidate))
    axes = (axis for tensor in op.inputs.values() for axis in tensor.axes)
    axis = next((name for name in axes if isinstance(case.dims.get(name), int)), None)
    while axis is not None and 4 * elements(op, case) < DERIVED_BYTES:
        larger = case.resized(**{axis: 2 * max(1, case.dims[axis])})
        if op.misfit(larger.dims, larger.params) or elements(op, larger) <= elements(op, case):
            break
        case = larger
    return case


def _gated(covered: Sequence[Timed], device: torch.device) -> list[tuple[Timed, list[str]]]:
    """Which of the timed cases that a provider covers are benchmarks, and the metrics of each."""
    if device.type == "cpu":
        return [(timed, [DEVICE]) for timed in covered[:1]]
    if len(covered) < 2:
        return [(timed, [DEVICE, HOST]) for timed in covered]
    return [(covered[-1], [DEVICE]), (covered[0], [HOST])]


def _slowdowns(
    op: Op, provider: Provider, device: torch.device, defaults: Mapping[str, float]
) -> dict[str, float]:
    """The slowdowns that a provider states, else its op, else the defaults.

    Raises ValueError for an unknown metric or an invalid slowdown.
    """
    for who, slowdowns in ((f"op {op.name!r}", op.slowdowns), (provider, provider.slowdowns)):
        for metric, share in slowdowns.items():
            if metric not in ON_GPU or not (is_number(share) and share > 0):
                raise ValueError(
                    f"{who}: slowdowns of {metric!r}: {share!r}: give {' or '.join(ON_GPU)} "
                    "a share above 0, as 0.02"
                )
    return usual_slowdowns(device, {**defaults, **op.slowdowns, **provider.slowdowns})


def _not_timed(op: Op, timed: Timed, device: torch.device) -> str | None:
    provider = op[timed.provider]
    reason = untimed(provider, device)
    if reason is None and provider.waits and device.type != "cpu":
        reason = "its calls wait for the device, or fill its queue: its time cannot be isolated"
    return reason or timed.case_of(op, provider).unsupported()


def _name(op: Op, timed: Timed) -> str:
    case = op.timed[timed.case]
    layout = "" if timed.layout == "contiguous" else f"-{timed.layout}"
    return f"{op.name}-{timed.provider}-{case}-{timed.dtype}{layout}/{passes_of(op)[-1]}"


# -- what both sides have --------------------------------------------------------------------------


class Stopped(Exception):  # noqa: N818
    """The whole comparison has one verdict: nothing more can be measured."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


@dataclass
class Listed:
    """found: what both sides have; new: what the base's tree lacks; others: verdicts on what cannot
    be compared."""

    common: dict[str, Benchmark] = field(default_factory=dict)
    new: dict[str, Benchmark] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)


def check_identities(
    roots: Mapping[str, Path],
    who: Mapping[str, Mapping[str, Any]],
    *,
    toolchains: bool,
    one_tree: bool,
) -> None:
    """Raise Stopped where a side runs another tree, both run one, or their devices or versions
    differ. toolchains: two interpreters are compared. one_tree: both may run one tree."""
    for name, root in roots.items():
        if who[name]["root"] != str(root.resolve()):
            text = f"the {name} ran the code in {who[name]['root']}, not that in {root}"
            raise Stopped(Verdict(name, Outcome.NOT_JUDGED, text))
    base, candidate = who[BASE], who[CANDIDATE]
    if base["root"] == candidate["root"] and not one_tree:
        text = f"both sides are {base['root']}: nothing is compared"
        raise Stopped(Verdict("trees", Outcome.MISSING, text))
    if base["device"] != candidate["device"]:
        text = f"{base['device']} and {candidate['device']}"
        raise Stopped(Verdict("device", Outcome.OTHER_DEVICE_OR_VERSION, text))
    alike = base["versions"] == candidate["versions"]
    if not toolchains and not alike:
        text = f"{base['versions']} and {candidate['versions']}"
        raise Stopped(Verdict("versions", Outcome.OTHER_DEVICE_OR_VERSION, text))
    if toolchains and alike and base["python"] == candidate["python"]:
        text = f"both sides are {base['python']}: nothing is compared"
        raise Stopped(Verdict("toolchain", Outcome.MISSING, text))


def matched(
    base: Mapping[str, Benchmark],
    candidate: Mapping[str, Benchmark],
    accepted: Waivers,
    *,
    ops: Collection[str] = (),
    toolchains: bool = False,
) -> Listed:
    """The benchmarks of both sides by name. ops: the only ones that are compared; empty: all.
    toolchains: what only one interpreter has is not new.

    Raises Stopped where a base has no benchmark at all, and where an accepted entry or ``ops`` name
    what neither side has.
    """
    if not candidate and not base:
        text = "neither side has a benchmark"
        raise Stopped(Verdict("benchmarks", Outcome.MISSING, text))
    if not base:
        raise Stopped(Verdict(BASE, Outcome.NOT_JUDGED, "it has no benchmark: nothing is compared"))
    try:
        accepted.check([*base, *candidate])
    except ValueError as error:
        raise Stopped(Verdict("accepted", Outcome.MISSING, str(error))) from error
    listed = Listed()
    benchmarks = {**base, **candidate}
    if unknown := [op for op in ops if not any(map(_is_of(op), benchmarks.values()))]:
        text = f"--op {unknown[0]}: neither side has a benchmark of it"
        raise Stopped(Verdict("benchmarks", Outcome.MISSING, text))
    if ops:
        benchmarks = {
            n: benchmark
            for n, benchmark in benchmarks.items()
            if any(_is_of(op)(benchmark) for op in ops)
        }
    for name in benchmarks:
        if name not in candidate and accepted.is_removed(name):
            listed.verdicts.append(Verdict(name, Outcome.SAME, "removed, and accepted as such"))
        elif name not in candidate:
            text = "the base has it, the candidate does not"
            listed.verdicts.append(Verdict(name, Outcome.MISSING, text))
        elif name in base:
            listed.common[name] = _stricter(base[name], candidate[name])
        elif toolchains:
            text = "the base's interpreter does not have it"
            listed.verdicts.append(Verdict(name, Outcome.NO_BASELINE, text))
        else:
            listed.new[name] = replace(candidate[name], new=True)
    return listed


def _stricter(base: Benchmark, candidate: Benchmark) -> Benchmark:
    """The candidate's benchmark with the stricter tolerances and bar of both sides: a change can
    neither widen its own tolerance nor drop a metric."""
    slowdowns = dict(candidate.slowdowns)
    for metric, slowdown in base.slowdowns.items():
        slowdowns[metric] = min(slowdown, slowdowns.get(metric, slowdown))
    bar = min(base.layout_bar, candidate.layout_bar)
    return replace(candidate, slowdowns=slowdowns, layout_bar=bar)


def _is_of(op: str) -> Callable[[Benchmark], bool]:
    """Whether a benchmark is one of that op; a step is of none."""
    return lambda benchmark: (
        isinstance(benchmark.timed, Timed) and not benchmark.factory and benchmark.timed.op == op
    )
