"""The benchmarks of a comparison: what each side declares, and which of it both have."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from tinyllama.harness.gate.waivers import IMPORT, Waivers
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
class Registered:
    """What is gated.

    package: whose ops are loaded. files: paths and patterns of further ops, relative to the root of
    a tree, as pytest expands them. own: only what files declare are benchmarks, as in a repository
    that is not the harness's; then no installed plugin is loaded. factory: ``module:name`` of a
    function that gives the other benchmarks of a device; empty: there are none.
    """

    package: str
    files: tuple[str, ...] = ()
    own: bool = False
    factory: str = ""

    def paths(self) -> tuple[str, ...]:
        """The files of ops of the tree in the current folder, as absolute paths."""
        root = Path.cwd()
        matches = (glob.glob(pattern, root_dir=root, recursive=True) for pattern in self.files)
        paths = (str(root / name) for names in matches for name in sorted(names))
        return tuple(dict.fromkeys(path for path in paths if os.path.isfile(path)))

    def loaded(self) -> tuple[Registry, dict[str, str]]:
        """As `op_contender.loaded`, of the tree in the current folder."""
        return loaded(self.package, self.paths(), plugins=not self.own)

    def ops(self, device: torch.device) -> Iterator[tuple[Op, list[Provider]]]:
        """The ops of the tree in the current folder that are benchmarks on a device, with their
        providers. An op without timed cases gets one."""
        registry, named = self.loaded()
        providers_of = {op.name: list(op.providers.values()) for op in registry.values()}
        if self.own:
            providers_of = declared_by(registry, named)
        for name, providers in providers_of.items():
            op = registry[name]
            if self.own and not op.timed:
                on_cpu = device.type == "cpu"
                op.timed = [derived_case(op, DERIVED_ON_CPU if on_cpu else DERIVED_ON_GPU)]
            yield op, providers

    def place(self, module: str) -> str:
        """The name of a module, or the path of the file of ops that it is in a repository that is
        not the harness's."""
        named = self.loaded()[1]
        return os.path.relpath(named[module]) if self.own and module in named else module


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
# Processes that run the same code differ by 6% in host time.
ON_GPU = {DEVICE: 0.02, HOST: 0.15}
ON_CPU = {DEVICE: 0.10}
# Bytes of the inputs, as float32, of a case that no op names.
DERIVED_ON_GPU, DERIVED_ON_CPU = 2**26, 2**23
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
    """The stated slowdowns, else the defaults; on a CPU at least the defaults, which are above its
    noise."""
    if device.type != "cpu":
        return {**ON_GPU, **stated}
    return {metric: max(least, stated.get(metric, 0.0)) for metric, least in ON_CPU.items()}


def declared(
    device: torch.device, registered: Registered, slowdowns: Mapping[str, float] | None = None
) -> list[Benchmark]:
    """The benchmarks of a device, of the tree in the current folder. slowdowns: what its
    pyproject.toml states, by metric; see `usual_slowdowns`.

    Device time is of the largest timed case that the provider covers; host time, which a caller
    waits for where calls are short, of the smallest. Device time of the cases between these is
    `Benchmark.further`. On a CPU only the smallest is timed. A reference beside other providers has
    host time alone: nobody ships it, and its large cases take as long as all else. A
    provider with a backward of its own is timed on the op's layouts, too. One that cannot be timed
    has a benchmark without times.
    """
    return [
        benchmark
        for op, providers in registered.ops(device)
        for provider in (providers if op.timed else ())
        for benchmark in _declared_by(op, provider, device, registered, slowdowns or {})
    ]


def _declared_by(
    op: Op,
    provider: Provider,
    device: torch.device,
    registered: Registered,
    defaults: Mapping[str, float],
) -> Iterator[Benchmark]:
    slowdowns = _slowdowns(op, provider, device, defaults)
    of_further = {DEVICE: max(FURTHER, slowdowns[DEVICE])}
    widest = "bf16" if device.type != "cpu" and cannot("bf16", device) is None else "fp32"
    dtype = timed_dtype(op, widest)
    cases = [Timed(op.name, provider.name, place, dtype) for place in range(len(op.timed))]
    covered = [timed for timed in cases if _not_timed(op, timed, device) is None]

    def benchmark(timed: Timed, stated: Mapping[str, float]) -> Benchmark:
        modules = registered.place(op.module), registered.place(provider.module)
        return Benchmark(_name(op, timed), timed, modules[0], stated, registered=modules[1])

    reference = provider is op["eager"] and len(op.providers) > 1
    for timed, metrics, further in _times(covered, device, reference=reference):
        if further:
            yield replace(benchmark(timed, of_further), further=True)
            continue
        yield benchmark(timed, {metric: slowdowns[metric] for metric in metrics})
        if DEVICE in metrics and provider.derived is not None:
            # Which layouts compositions of torch's functions copy is torch's decision.
            for place, (layout, bar) in enumerate(layouts_of(op, provider).items()):
                stated = of_further if place else {DEVICE: slowdowns[DEVICE]}
                laid_out = benchmark(replace(timed, layout=layout), stated)
                yield replace(laid_out, further=place > 0, layout_bar=bar)
    if not covered:
        reason = str(_not_timed(op, cases[0], device))
        name = f"{op.name}-{provider.name}/results"
        yield replace(benchmark(cases[0], {}), name=name, untimed=reason)


def layouts_of(op: Op, provider: Provider) -> Mapping[str, float]:
    """The layouts of an op that a provider takes, with the bar on its time on each."""
    return {} if provider.contiguous else op.layouts


def derived_case(op: Op, least: int) -> Case:
    """The case that is timed where an op names none: its largest, with the first axis of its inputs
    doubled until they have so many bytes in float32, as far as `Op.fits` allows."""
    case = max(op.cases, key=lambda candidate: elements(op, candidate))
    axes = (axis for tensor in op.inputs.values() for axis in tensor.axes)
    axis = next((name for name in axes if isinstance(case.dims.get(name), int)), None)
    while axis is not None and 4 * elements(op, case) < least:
        larger = case.resized(**{axis: 2 * max(1, case.dims[axis])})
        if op.misfit(larger.dims, larger.params) or elements(op, larger) <= elements(op, case):
            break
        case = larger
    return case


def _times(
    covered: Sequence[Timed], device: torch.device, *, reference: bool
) -> list[tuple[Timed, list[str], bool]]:
    """Of the timed cases that a provider covers, those that are benchmarks, the metrics of each,
    and whether it is a further one."""
    if device.type == "cpu" or reference:
        metric = DEVICE if device.type == "cpu" else HOST
        return [(timed, [metric], False) for timed in covered[:1]]
    if len(covered) < 2:
        return [(timed, [DEVICE, HOST], False) for timed in covered]
    ends = [(covered[-1], [DEVICE], False), (covered[0], [HOST], False)]
    return ends + [(timed, [DEVICE], True) for timed in covered[1:-1]]


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
    """common: what both sides have; new: what the base's tree lacks; verdicts: on what cannot be
    compared."""

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
        text = (
            "no benchmark: neither [tool.tinyllama] ops, in the pyproject.toml at the root of the "
            "checkout, nor --ops names a file that declares ops"
        )
        raise Stopped(Verdict("benchmarks", Outcome.MISSING, text))
    if not base:
        raise Stopped(Verdict(BASE, Outcome.NOT_JUDGED, "it has no benchmark: nothing is compared"))
    try:
        accepted.check([*base, *candidate, IMPORT])
    except ValueError as error:
        raise Stopped(Verdict("accepted", Outcome.MISSING, str(error))) from error
    listed = Listed()
    benchmarks = {**base, **candidate}
    there = {op for op in map(_op_of, benchmarks.values()) if op}
    if unknown := [op for op in ops if op not in there]:
        names = ", ".join(sorted(there))
        text = f"--op {unknown[0]}: neither side has a benchmark of it; use one of {names}"
        raise Stopped(Verdict("benchmarks", Outcome.MISSING, text))
    if ops:
        benchmarks = {name: b for name, b in benchmarks.items() if _op_of(b) in ops}
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


def _op_of(benchmark: Benchmark) -> str:
    """The op of a benchmark; empty for a step, which is of none."""
    timed = benchmark.timed
    return timed.op if isinstance(timed, Timed) and not benchmark.factory else ""
