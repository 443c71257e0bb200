"""The input of a comparison, and the state of each benchmark in it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tinyllama.harness.gate.benchmarks import Benchmark, Registered
from tinyllama.harness.gate.calibrate import Noise
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.metric import Series
from tinyllama.harness.gate.pair import Effort, Pair, Tree
from tinyllama.harness.gate.schedule import PairPool, opened
from tinyllama.harness.gate.waivers import Waivers
from tinyllama.harness.records.verdict import Figure, Verdict


@dataclass(frozen=True)
class Affected:
    """Why a benchmark is measured.

    why: in words. host: more differs than the bodies of kernels; without it, equal compiled kernels
    are IDENTICAL, too. op_differs: a file of the op's own differs; such benchmarks are timed first.
    """

    why: str
    host: bool = True
    op_differs: bool = False


@dataclass(frozen=True)
class Setting:
    """The input of a comparison.

    affected: of all benchmarks, by name, those that may differ; the others are IDENTICAL.
    toolchains: the interpreters are compared, not the trees. measure_all: time identical
    benchmarks too, for A/A blocks. audit: how many IDENTICAL benchmarks are timed all the same.
    all_verdicts: decide each benchmark, also after one is SLOWER. only: whether a name is compared.
    ops: the only ones that are compared; empty: all benchmarks. processor: both sides are pinned to
    it in their turns. at_once: how many pairs prepare benchmarks at the same time; one at a time is
    timed. seconds: by stage, what came before. contents: a digest of all that is in a tree.
    use_device, wait_until_idle: called once, before a benchmark is prepared, and before one is
    timed; they return why that cannot be, or None.
    say: prints a line; doing: is told what takes time now.
    """

    base: Tree
    candidate: Tree
    device: torch.device
    registered: Registered
    noise: Noise
    accepted: Waivers
    watch: DeviceGuard
    affected: Callable[[Sequence[Benchmark]], Mapping[str, Affected]]
    toolchains: bool = False
    measure_all: bool = False
    audit: int = 0
    all_verdicts: bool = False
    only: Callable[[str], bool] | None = None
    ops: tuple[str, ...] = ()
    processor: int | None = None
    at_once: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    contents: Callable[[Tree], str] | None = None
    effort: Effort | None = None
    use_device: Callable[[], str | None] = lambda: None
    wait_until_idle: Callable[[], str | None] = lambda: None
    say: Callable[[str], None] = lambda line: None
    doing: Callable[[str], None] = lambda text: None
    pairs: Callable[..., AbstractContextManager[list[Pair]]] = opened

    def ahead(self) -> AbstractContextManager[None]:
        """While others are prepared, and nothing is timed, pairs that were started ahead make their
        first use of the device."""
        return self.pairs.opening() if isinstance(self.pairs, PairPool) else nullcontext()


@dataclass
class BenchmarkState:
    """What was measured of one benchmark, and in the end its verdict.

    proofs: of each side, once it was verified. paces: by side, seconds of a call by the judge's
    clock. first_calls: of each block, by side, seconds from warm caches. moved: which kernels of a
    slower one.
    """

    benchmark: Benchmark
    series: dict[str, Series] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    proofs: dict[str, Any] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)
    first_calls: list[Mapping[str, float]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        return self.benchmark.name

    @property
    def blocks(self) -> int:
        return min((len(series.statistics) for series in self.series.values()), default=0)

    def settled(self, metric: str) -> Figure | None:
        """The figure of a metric, once it is decided."""
        return next((figure for figure in self.figures if figure.metric == metric), None)

    @property
    def again(self) -> int:
        return min((len(series.again) for series in self.series.values()), default=0)

    def report(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "outcome": self.verdict.outcome.title if self.verdict else None,
            "text": self.verdict.text if self.verdict else None,
            "figures": [
                {**asdict(figure), "outcome": figure.outcome.title} for figure in self.figures
            ],
            "blocks": {metric: series.statistics for metric, series in self.series.items()},
            "all_work": {metric: series.all_work for metric, series in self.series.items()},
            "confirmation": {metric: series.again for metric, series in self.series.items()},
            "first_calls": [dict(seconds) for seconds in self.first_calls],
            "moved": self.moved,
        }
