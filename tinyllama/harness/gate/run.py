"""What the stages of a comparison share: its setting, the state of each benchmark, fresh pairs, and
how an error becomes a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import mean

from tinyllama.harness.gate.benchmarks import Stopped, unable
from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, Rule
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.identity import Differs
from tinyllama.harness.gate.memory import EXACT_SHARE, READY_SHARE, Memory, bytes_of
from tinyllama.harness.gate.pair import CANDIDATE, Effort, Pair, SideError, Tree
from tinyllama.harness.gate.setting import BenchmarkState, Setting, margin_of
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.machine.worker import all_ended
from tinyllama.harness.records.verdict import Outcome, Verdict


class Run:
    """One comparison while it goes on."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trees = (setting.base, setting.candidate)
        self.effort = setting.effort or Effort.on(setting.device)
        self.found: dict[str, BenchmarkState] = {}
        self.new: dict[str, BenchmarkState] = {}  # what the base lacks
        self.left_out: dict[str, int] = {}  # by reason, how many providers are not timed here
        self.others: list[Verdict] = []
        self.versions: dict[str, str] = {}
        self.launches = self.disturbed = self.discarded = 0  # blocks, waves, blocks
        self.changed = list(setting.changed)  # of what judges
        self.unidentified: Mapping[str, str] = {}  # by benchmark, why it is no IDENTICAL
        self.differs: Differs | None = None  # once it was observed
        self.seconds = Stages(setting.seconds)  # those before the session too
        self.stage = ""
        memory = bytes_of(setting.device)
        self.ready = Memory(READY_SHARE * memory)  # for what is prepared, or ready to be timed
        self.exact = Memory(EXACT_SHARE * memory)  # for comparing with float64
        with self.seconds.of("trees"):
            self.contents = {tree.name: self._contents(tree) for tree in self.trees}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of a `with` block to those of a stage."""
        self.stage = stage
        self.setting.doing(f"{stage}: starting both sides")
        with self.seconds.of(stage):
            yield

    def part(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of a `with` block to those of a part of the stage."""
        return self.seconds.of(f"{self.stage}: {name}")

    # -- verdicts ---------------------------------------------------------------------------

    def undecided(self) -> list[BenchmarkState]:
        return [one for one in self.found.values() if one.verdict is None]

    def unsettled(self) -> list[BenchmarkState]:
        """The undecided ones, and those that are NEW and not measured yet."""
        return [*self.undecided(), *(one for one in self.new.values() if one.verdict is None)]

    def settle(self, one: BenchmarkState, outcome: Outcome, text: str) -> None:
        one.verdict = Verdict(one.name, outcome, text, tuple(one.figures))

    def verdicts(self) -> Iterator[Verdict]:
        yield from self.others
        for one in (*self.found.values(), *self.new.values()):
            yield one.verdict or Verdict(one.name, Outcome.MISSING, "no verdict was reached")

    def interrupted(self, why: str) -> list[Verdict]:
        """The verdicts of a comparison that did not end: what is undecided is NOT DECIDED, and so
        is what is SLOWER and was not confirmed."""
        for one in [*self.unsettled(), *filter(unconfirmed, self.found.values())]:
            self.settle(one, Outcome.NOT_DECIDED, f"{why} ended the gate; {_so_far(one)}")
        return list(self.verdicts())

    def allowed(self, one: BenchmarkState) -> Callable[[str], tuple[float, int]]:
        """By metric, the accepted share and the accepted number."""
        accepted = self.setting.accepted
        return lambda metric: (accepted.amount(one.name, metric), accepted.more(one.name, metric))

    def series(self, one: BenchmarkState, metric: str) -> Series:
        """Of a metric of a benchmark, begun where it is not there yet."""
        if metric not in one.series:
            amount = self.setting.accepted.amount(one.name, metric)
            margin = margin_of(metric, self.setting.device)
            tolerance = one.benchmark.slowdowns[metric]
            tests = sum(len(each.benchmark.slowdowns) for each in self.found.values())
            rule = Rule(tests=tests, margin=margin + amount, tolerance=tolerance + amount)
            history = self.setting.noise.spread(one.name, metric, self.versions)
            one.series[metric] = Series(rule, history, amount)
        return one.series[metric]

    @contextmanager
    def errors_as_verdict(self, one: BenchmarkState, *, settle: bool = True) -> Iterator[None]:
        """An error with one benchmark is its verdict; the others continue. settle: without it, the
        error explains only why nothing is attributed."""
        self.setting.doing(self._doing(one))
        try:
            yield
        except SideError as error:
            if all_ended():
                raise
            outcome = Outcome.WRONG_RESULT if error.wrong else Outcome.WORKER_DIED
            if settle:
                self.settle(one, outcome, _words(error))
            else:
                one.moved = [f"not attributed: {_words(error)}"]
        except ValueError as error:
            if settle:
                self.settle(one, Outcome.MISSING, str(error))
            else:
                one.moved = [f"not attributed: {error}"]

    def _doing(self, one: BenchmarkState) -> str:
        every = [*self.found.values(), *self.new.values()]
        settled = sum(each.verdict is not None for each in every)
        block = f", block {self.launches}" if self.launches else ""
        return f"{self.stage}: {one.name}; {settled} of {len(every)} settled{block}"

    # -- processes and trees ----------------------------------------------------------------

    @contextmanager
    def pairs(self, count: int = 1) -> Iterator[list[Pair]]:
        """Fresh pairs. Where a side cannot start, the comparison stops: NO BASE for the base."""
        self.untampered()
        try:
            setting = self.setting
            starting = ExitStack()
            starting.enter_context(self.part("start processes"))
            with (
                starting,
                setting.pairs(self.trees, setting.device, setting.registered, count) as pairs,
            ):
                starting.close()
                yield pairs
        except SideError as error:
            if all_ended():
                raise
            harness = any(one.name.startswith("tinyllama/harness/") for one in self.changed)
            unread = error.side == CANDIDATE and harness
            outcome = Outcome.JUDGE_CHANGED if unread else unable(error.side)
            raise Stopped(Verdict(error.side, outcome, _words(error))) from error

    def working(self, pair: Pair) -> Pair:
        """The pair, with fresh workers where one of them failed."""
        if pair.failed:
            pair.restart()
        return pair

    def untampered(self) -> None:
        """Raise Stopped where a tree is not what it was at the start."""
        for tree in self.trees:
            if self._contents(tree) != self.contents[tree.name]:
                text = "its files were changed while it was compared: find what writes into them"
                raise Stopped(Verdict(tree.name, Outcome.TAMPERED, text))

    def _contents(self, tree: Tree) -> str:
        return "" if self.setting.contents is None else self.setting.contents(tree)


def unconfirmed(one: BenchmarkState) -> bool:
    """Whether times of a benchmark are SLOWER, and were not confirmed in fresh blocks."""
    slower = (f for f in one.figures if f.outcome is Outcome.SLOWER and f.metric in one.series)
    return has_outcome(one, Outcome.SLOWER) and one.again < CONFIRM_BLOCKS and any(slower)


def _so_far(one: BenchmarkState) -> str:
    if not one.blocks:
        return "it was not measured"
    means = (f"{m} {math.expm1(mean(s.statistics)):+.2%}" for m, s in one.series.items())
    known = f"so far {', '.join(means)} in {one.blocks} blocks"
    return f"{known}, which was not confirmed" if unconfirmed(one) else known


def has_outcome(one: BenchmarkState, outcome: Outcome) -> bool:
    return one.verdict is not None and one.verdict.outcome is outcome


def _words(error: SideError) -> str:
    last = error.details.strip().splitlines()[-1:]
    return f"{error}" + (f" ({last[0]})" if last and last[0] not in str(error) else "")
