"""The input of a comparison, and the state of each benchmark in it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

import torch

from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Benchmark
from tinyllama.harness.gate.calibrate import Noise
from tinyllama.harness.gate.counters import FIRST_CALL_SECONDS, seconds_figure
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE, Series
from tinyllama.harness.gate.pair import Effort, Pair, Tree
from tinyllama.harness.gate.sequential_test import Call
from tinyllama.harness.gate.waivers import Waivers
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict, worst

FIRST_CALL = "first_call_seconds"


class Stages(dict[str, float]):
    """Seconds by the name of a stage."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the seconds of a `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.monotonic() - began


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

    affected: of all benchmarks, by name, those that may differ; the others are IDENTICAL. pairs: as
    of `PairPool`. toolchains: the interpreters are compared, not the trees. measure_all: time
    identical benchmarks too, for A/A blocks. audit: how many IDENTICAL benchmarks are timed all the
    same. all_verdicts: decide each benchmark, also after one is SLOWER. ops: the only ones that are
    compared; empty: all benchmarks. processor: both sides are pinned to it in their turns. at_once:
    how many pairs prepare benchmarks at the same time; one at a time is timed. seconds: by stage,
    what came before. say: prints a line; doing: is told what takes time now.
    """

    base: Tree
    candidate: Tree
    device: torch.device
    noise: Noise
    accepted: Waivers
    guard: DeviceGuard
    affected: Callable[[Sequence[Benchmark]], Mapping[str, Affected]]
    pairs: Callable[..., AbstractContextManager[list[Pair]]]
    toolchains: bool = False
    measure_all: bool = False
    audit: int = 0
    all_verdicts: bool = False
    ops: tuple[str, ...] = ()
    processor: int | None = None
    at_once: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    effort: Effort | None = None
    say: Callable[[str], None] = lambda line: None
    doing: Callable[[str], None] = lambda text: None


@dataclass
class BenchmarkState:
    """What was measured of one benchmark, and in the end its verdict.

    proofs: of each side, once it was verified. paces: by side, seconds of a call by the judge's
    clock. seconds: of each block, by metric, of a call of the candidate. first_calls: of each
    block, by side, seconds from warm caches. moved: which kernels of a slower one.
    """

    benchmark: Benchmark
    series: dict[str, Series] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    proofs: dict[str, Any] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    first_calls: list[Mapping[str, float]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        return self.benchmark.name

    @property
    def blocks(self) -> int:
        return min((len(series.statistics) for series in self.series.values()), default=0)

    @property
    def again(self) -> int:
        return min((len(series.again) for series in self.series.values()), default=0)

    def settle(self, outcome: Outcome, text: str) -> None:
        self.verdict = Verdict(self.name, outcome, text, tuple(self.figures))

    def has(self, outcome: Outcome) -> bool:
        return self.verdict is not None and self.verdict.outcome is outcome

    def settled(self, metric: str) -> Figure | None:
        """The figure of a metric, once it is decided."""
        return next((figure for figure in self.figures if figure.metric == metric), None)

    # -- its blocks -------------------------------------------------------------------------

    def look(self, *, last: bool) -> None:
        """Decide the metrics that can be decided. Once one is SLOWER, the others take no more
        blocks: the benchmark is decided."""
        calls = {
            metric: (series, series.look(), series.work_figure(metric))
            for metric, series in self.series.items()
            if self.settled(metric) is None
        }
        last |= any(call is Call.SLOWER or work for _, call, work in calls.values())
        for metric, (series, call, work) in calls.items():
            self.figures += [work] if work else []
            waits = call is Call.MORE or (series.suspect and call is not Call.SLOWER)
            if last or not waits:
                self.figures.append(series.figure(metric, call))

    @property
    def shows_slowdown(self) -> bool:
        return any(
            mean(series.statistics) > series.rule.tolerance / 2 or series.suspect
            for metric, series in self.series.items()
            if self.settled(metric) is None
        )

    def hold_to_layout_bar(self, contiguous: "BenchmarkState", accepted: float) -> None:
        """Add the figure of the op's bar on a layout, from the blocks of this benchmark and of the
        same on contiguous inputs, if both have some.

        SLOWER where the ratio of both times is above the bar in all blocks but a quarter, which may
        have been disturbed, and above the base's ratio by more than the tolerance in as many, if
        the base was timed. accepted: by which share the bar may be exceeded.
        """
        both = zip(self.seconds, contiguous.seconds, strict=False)  # one may need more blocks
        ratios = [strided[DEVICE] / dense[DEVICE] for strided, dense in both]
        metric = f"layouts {self.benchmark.timed.layout}"
        if not ratios or self.settled(metric) is not None:
            return
        limit = self.benchmark.layout_bar * (1 + accepted)
        text = (
            f"{metric} {median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] times as long "
            f"as contiguous in {len(ratios)} blocks, allowed {limit:g}"
        )
        slower = _all_but_a_quarter(ratios) > limit
        if DEVICE in self.series and DEVICE in contiguous.series:
            series, dense_series = self.series[DEVICE], contiguous.series[DEVICE]
            changes = zip(series.statistics, dense_series.statistics, strict=False)
            growth = _all_but_a_quarter([change - dense for change, dense in changes])
            slower = slower and growth > math.log1p(series.rule.tolerance)
            text += f"; at least {math.expm1(growth):+.2%} beyond the base's"
        outcome = Outcome.SLOWER if slower else Outcome.SAME
        self.figures.append(Figure(metric, outcome, text, after=median(ratios)))

    def conclude(self, accepted: float) -> None:
        """Settle it by its figures, with that of its first calls in the fresh processes of blocks.
        accepted: how many seconds more these may take."""
        if self.settled(FIRST_CALL) is None:
            seconds = {
                side: median(calls[side] for calls in self.first_calls)
                for side in (BASE, CANDIDATE)
            }
            self.figures.append(seconds_figure(FIRST_CALL, seconds, accepted, FIRST_CALL_SECONDS))
        shown = [
            figure
            for figure in self.figures
            if figure.metric in self.series or figure.outcome is not Outcome.SAME
        ]
        outcome = worst(figure.outcome for figure in self.figures)
        self.settle(outcome, "; ".join(figure.text for figure in shown))

    def so_far(self) -> str:
        if not self.blocks:
            return "it was not measured"
        means = (f"{m} {math.expm1(mean(s.statistics)):+.2%}" for m, s in self.series.items())
        text = f"so far {', '.join(means)} in {self.blocks} blocks"
        return f"{text}, which was not confirmed" if self.unconfirmed else text

    # -- a slowdown -------------------------------------------------------------------------

    @property
    def unconfirmed(self) -> bool:
        """Whether times are SLOWER, and were not confirmed in fresh blocks."""
        return self.has(Outcome.SLOWER) and self.needs_again > 0

    @property
    def needs_again(self) -> int:
        """How many fresh blocks its SLOWER times still need."""
        slower = [figure.metric for figure in self.figures if figure.outcome is Outcome.SLOWER]
        return max(
            (
                series.needs_again(of_work=name != metric)
                for metric, series in self.series.items()
                for name in (metric, ALL_WORK + metric)
                if name in slower
            ),
            default=0,
        )

    def confirm(self) -> None:
        """Hold each time that is SLOWER to the fresh blocks, once."""
        for place, figure in enumerate(self.figures):
            series = self.series.get(figure.metric.removeprefix(ALL_WORK))
            if figure.outcome is Outcome.SLOWER and series and "confirmed" not in figure.text:
                self.figures[place] = series.confirm(figure)

    @property
    def is_slower_on_device(self) -> bool:
        figure = self.settled(DEVICE)
        return figure is not None and figure.outcome is Outcome.SLOWER

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
            "seconds": [dict(seconds) for seconds in self.seconds],
            "first_calls": [dict(seconds) for seconds in self.first_calls],
            "moved": self.moved,
        }


def _all_but_a_quarter(values: Sequence[float]) -> float:
    """What all of these values reach, but for the smallest quarter."""
    return sorted(values)[len(values) // 4]
