"""One side of a comparison, in a worker of its own interpreter and tree.

It lists its benchmarks and times them in turns.
"""

import contextlib
import importlib
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import tinyllama
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.registry import Registry
from tinyllama.harness.gate.compiled import fingerprint, resources
from tinyllama.harness.gate.judged import declarations
from tinyllama.harness.gate.once import installed
from tinyllama.harness.gate.own import Own, strays
from tinyllama.harness.gate.subject import DEVICE, HOST, Subject
from tinyllama.harness.machine.device import cannot, current, device_name
from tinyllama.harness.machine.worker import TRITON_CACHE, caches_in
from tinyllama.harness.measure.op_contender import (
    DTYPE_OF,
    Timed,
    loaded,
    passes_of,
    timed_dtype,
    untimed,
)
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.results import is_number, versions

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
    op's own files differ. moved: the bytes that a call must move; 0: unknown.
    """

    name: str
    timed: Any
    module: str
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    factory: str = ""
    registered: str = ""
    layouts: Mapping[str, float] = field(default_factory=dict)
    further: bool = False
    moved: float = 0.0


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
            moved=_moved(op, timed),
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


def _moved(op: Op, timed: Timed) -> float:
    """The bytes that a call of an op must move, if it declares them."""
    dims, size = op.timed[timed.case].dims, DTYPE_OF[timed.dtype].itemsize
    return sum(float(moved(size, **dims)) for moved in op.bytes.values())


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


class Side:
    """One side of the comparison, in its worker.

    package: of the ops. more: ``module:name`` of a function that gives a device's benchmarks beside
    those of ops. slowed: benchmark -> share of its device time that is added to each call as real
    work, to see the gate find it; never used in a comparison. usual: by metric, the smallest
    slowdown that must not be called SAME, of what states none. own: only these ops of the tree in
    the current folder are benchmarks; the harness is an installed one. kernels, base_kernels: the
    folders of `OnlyOnce` on a GPU; empty: there is none.
    """

    def __init__(
        self,
        device: str,
        package: str,
        files: Sequence[str] = (),
        slowed: Mapping[str, float] | None = None,
        more: str = "",
        usual: Mapping[str, float] | None = None,
        own: Own | None = None,
        kernels: str = "",
        base_kernels: str = "",
    ) -> None:
        self.device, self.once = current(device), None
        if kernels and self.device.type != "cpu":
            self.once = installed(Path(kernels), Path(base_kernels) if base_kernels else None)
        self.package, self.own = package, own
        self.files = own.found(Path.cwd()) if own else tuple(files)
        self.slowed, self.more, self.usual = dict(slowed or {}), more, dict(usual or {})
        self.processors = os.sched_getaffinity(0)
        self.subjects: dict[str, Any] = {}
        self.most: dict[str, int] = {}

    def identity(self) -> dict[str, Any]:
        """Which code this is, by what, on what."""
        return {
            "root": self._root(),
            "python": f"{platform.python_version()} {sys.prefix}",
            "versions": versions(),
            "device": device_name(self.device),
        }

    def _root(self) -> str:
        """The folder of the code; a file of it that is from elsewhere, where there is one."""
        if self.own is None:
            return str(Path(tinyllama.__file__).resolve().parent.parent)
        loaded(self.package, self.files)
        root = Path.cwd().resolve()
        return next(iter(strays(root)), str(root))

    def benchmarks(self) -> list[Benchmark]:
        found = declared(self.device, self.package, self.files, self.usual, self.own)
        further = _imported(self.more)(self.device) if self.more else []
        usual = usual_slowdowns(self.device, self.usual)
        return [*found, *(replace(one, slowdowns=one.slowdowns or usual) for one in further)]

    def declarations(self) -> dict[str, str]:
        """By ``op: part``, digests of what the ops declare that decides on their providers."""
        registry, named = loaded(self.package, self.files)
        names = self.own.providers(registry, named) if self.own else registry
        return declarations(registry[name] for name in names)

    def left_out(self) -> dict[str, int]:
        """By reason, how many providers are not timed here."""
        return dict(left_out(self.device, self.package, self.files, self.own))

    def pin(self, processor: int | None) -> None:
        """Pin all threads to one processor, or (None) to those of the start again."""
        pin_threads(self.processors if processor is None else {processor})

    def use_caches(self, folder: str) -> None:
        """Compile into this folder from now on; but for Triton's kernels, which all pairs share."""
        os.environ.update(caches_in(Path(folder)))
        if self.once is not None:
            os.environ[TRITON_CACHE] = str(self.once.own)

    def warm_up_blas(self) -> None:
        """Make the first products of this process, whose allocations (BLAS's workspace) stay: they
        must not count as kept by a benchmark."""
        if self.device.type != "cpu":
            for dtype in (torch.float32, torch.float16):
                ones = torch.ones(16, 16, dtype=dtype, device=self.device)
                torch.nn.functional.linear(ones, ones, ones[0])
                torch.nn.functional.linear(ones, ones)

    def begin(self, name: str) -> float:
        """Prepare a benchmark; returns the seconds until its first call ended, compiling included,
        also of kernels that another process compiled.

        The name is looked up here: the other side may have it at another place of its timed cases.
        """
        found = next((one for one in self.benchmarks() if one.name == name), None)
        if found is None:
            raise ValueError(f"there is no benchmark {name!r}")
        start, before = time.perf_counter(), self._compiled_elsewhere()
        if found.factory:
            subject = _imported(found.factory)(found.timed, str(self.device))
        else:
            metrics = tuple(found.slowdowns)
            subject = Subject(found.timed, str(self.device), self.package, self.files, metrics)
        subject.run_once()
        seconds = time.perf_counter() - start + self._compiled_elsewhere() - before
        self.subjects[name] = subject
        if name in self.slowed:
            subject.slow_down(self.slowed[name])
        return seconds

    def _compiled_elsewhere(self) -> float:
        return 0.0 if self.once is None else self.once.more

    def verify(self, name: str) -> Any:
        """Hold a benchmark's results to float64; returns what later calls are held to."""
        self._give_back()
        before = self._reserved()
        if self.device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
        proofs = self.subjects[name].verify()
        self.most[name] = self._reserved(most=True) - before
        self._give_back()
        return proofs

    def most_bytes(self, name: str) -> int:
        """The most bytes of the device that `verify` took of a benchmark; 0 on a CPU."""
        return self.most.get(name, 0)

    def _reserved(self, *, most: bool = False) -> int:
        if self.device.type == "cpu":
            return 0
        read = torch.cuda.max_memory_reserved if most else torch.cuda.memory_reserved
        return read(self.device)

    def _give_back(self) -> None:
        """Give back the memory that nothing here holds: others compare with float64, too."""
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def expect(self, name: str, proofs: Any, warm_up: float) -> None:
        """Hold it to what was verified, then warm up for some seconds."""
        subject = self.subjects[name]
        subject.expect(proofs)
        self._give_back()
        subject.warm_up(warm_up)
        if isinstance(subject, Subject):
            subject.rehearse()

    def turn(self, name: str, seed: int) -> dict[str, float]:
        """Seconds of a call by metric. seed: of its input values, which no process has seen. A
        subject other than an op's has values of its own."""
        subject = self.subjects[name]
        return subject.gated_turn(seed) if isinstance(subject, Subject) else subject.gated_turn()

    def notes(self, name: str, seeds: Sequence[int]) -> list[list[int]]:
        """Digests of the results of calls in turns; none if the provider is not deterministic."""
        return [self.subjects[name].notes(seed) for seed in seeds]

    def hold(self, name: str, seed: int, call: int, exact: bool) -> None:
        """Compare a call of an earlier turn with eager's results or float64's; see
        `Subject.hold`."""
        self.subjects[name].hold(seed, call, exact)
        self._give_back()

    def ready(self, name: str) -> None:
        self.subjects[name].ready()

    def paced(self, name: str, calls: int) -> float:
        """Seconds of some calls in a row, of which the caller takes the time too."""
        seconds: float = self.subjects[name].paced(calls)
        return seconds

    def compile_layouts(self, name: str, names: Sequence[str]) -> None:
        """Compile what calls in these layouts need, before `layouts` times them."""
        self.subjects[name].compile_layouts(names)

    def layouts(self, name: str, names: Sequence[str]) -> dict[str, Ratio]:
        """How many times as long a call takes in these layouts as on contiguous inputs. What it
        gives must be expected."""
        found: dict[str, Ratio] = self.subjects[name].layouts(names, FEWEST_ROUNDS)
        return found

    def compiled(self, name: str) -> list[str]:
        """A digest of each launch of a kernel; none on a CPU."""
        return fingerprint(self.subjects[name].launched())

    def inputs(self, name: str) -> int:
        """A digest of the inputs of all seeds."""
        return self.subjects[name].input_digest()

    def counted(self, name: str) -> dict[str, int]:
        """The exact metrics: peak bytes, kept bytes, kernels, copies, synchronisations."""
        return self.subjects[name].counted()

    def profiles(self, name: str, times: int) -> list[dict[str, Any]]:
        """Seconds of each kernel, call by call, and the resources of Triton's."""
        subject = self.subjects[name]
        taken = resources(subject.launched())
        return [{"kernels": subject.profile(), "resources": taken} for _ in range(times)]

    def end(self, name: str) -> None:
        self.subjects.pop(name, None)
        self._give_back()


def pin_threads(processors: Collection[int]) -> None:
    """Pin every thread of this process to some processors."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), processors)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
