"""The input of a comparison, and the state of each benchmark in it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tinyllama.harness.gate.accepted import Accepted
from tinyllama.harness.gate.benchmarks import Benchmark, Registered
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.identity import Differs
from tinyllama.harness.gate.judged import Change
from tinyllama.harness.gate.memory import exact_bytes
from tinyllama.harness.gate.noise import Noise
from tinyllama.harness.gate.pair import Effort, Pair, Tree
from tinyllama.harness.gate.pool import PairPool, opened
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.gate.watch import Watch
from tinyllama.harness.records.verdict import Figure, Verdict

MARGINS = {DEVICE: 0.005, HOST: 0.02}
MARGIN_ON_CPU = 0.02


def margin_of(metric: str, device: torch.device) -> float:
    """The slowdown of a metric on a device that counts as none."""
    return MARGIN_ON_CPU if device.type == "cpu" else MARGINS[metric]


@dataclass(frozen=True)
class Setting:
    """The input of a comparison.

    sources: (tree, benchmark) -> digests of the source that it runs, of all of it and of the host
    code alone. differs: of two trees and benchmarks, why each is measured; None: by source alone.
    toolchains: the interpreters are compared, not the trees. measure_all: time
    identical benchmarks too, for A/A blocks. all_verdicts: decide each benchmark, also after one
    is SLOWER. only: whether a name is compared. ops: the only ones that
    are compared; empty: all benchmarks. processor: both
    sides are pinned to it in their turns. at_once: how many pairs prepare benchmarks at the same
    time; one at a time is timed. changed: files of the candidate that would judge, and
    differ from the base's. seconds: by stage, what came before. contents: a digest of all that is
    in a tree. say: prints a line; doing: is told what takes time now.
    """

    base: Tree
    candidate: Tree
    device: torch.device
    registered: Registered
    noise: Noise
    accepted: Accepted
    watch: Watch
    sources: Callable[[Tree, Benchmark], tuple[Mapping[str, str], Mapping[str, str]]]
    differs: Callable[[Sequence[Tree], Sequence[Benchmark]], Differs] | None = None
    toolchains: bool = False
    measure_all: bool = False
    all_verdicts: bool = False
    only: Callable[[str], bool] | None = None
    ops: tuple[str, ...] = ()
    processor: int | None = None
    at_once: int = 1
    changed: tuple[Change, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    contents: Callable[[Tree], str] | None = None
    effort: Effort | None = None
    say: Callable[[str], None] = lambda line: None
    doing: Callable[[str], None] = lambda text: None
    pairs: Callable[..., AbstractContextManager[list[Pair]]] = opened

    def ahead(self) -> AbstractContextManager[None]:
        """While others are prepared, and nothing is timed, pairs that were started ahead make their
        first use of the device."""
        return self.pairs.opening() if isinstance(self.pairs, PairPool) else nullcontext()


@dataclass
class BenchmarkState:
    """What was measured of one benchmark, and in the end its verdict."""

    benchmark: Benchmark
    series: dict[str, Series] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    proofs: dict[str, Any] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)  # by side; see `Pair.pace`
    seconds: dict[str, float] = field(default_factory=dict)  # that it took, by what was done
    moved: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    exact: int = 0  # bytes of the device that a side held most while it was verified; 0: unknown

    @property
    def exact_bytes(self) -> float:
        """That a side needs to compare results with float64."""
        return 1.1 * self.exact or exact_bytes(self.benchmark)

    @property
    def name(self) -> str:
        return self.benchmark.name

    @contextmanager
    def takes(self, what: str) -> Iterator[None]:
        """Add the seconds of a `with` block to those of what it does."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began

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
            "figures": [{**asdict(one), "outcome": one.outcome.title} for one in self.figures],
            "blocks": {metric: series.statistics for metric, series in self.series.items()},
            "slow_turns": {metric: series.excesses for metric, series in self.series.items()},
            "confirmation": {metric: series.again for metric, series in self.series.items()},
            "moved": self.moved,
            "seconds": self.seconds,
        }
