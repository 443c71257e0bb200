"""The whole comparison of a candidate with a base: what is identical, slower, or cannot be told.

    listed     both sides say what they have            -> MISSING
    sources    what each benchmark runs, as source      -> IDENTICAL, without a GPU
    prepared   compiled from cold, inputs, counts       -> IDENTICAL kernels; exact figures; NEW
    verified   results held to float64, once a side     -> WRONG RESULT
    blocks     fresh pairs, a look after every fourth   -> SAME, FASTER, SLOWER, INCONCLUSIVE
    confirmed  SLOWER once more in fresh pairs          -> SLOWER, or INCONCLUSIVE
    moved      profiles of both sides of what is slower -> which kernels

Whatever keeps a benchmark from its verdict is a verdict: nothing is left out in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tinyllama.harness.gate.attribution import PROFILES, moved
from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, Call, Rule
from tinyllama.harness.gate.exact import (
    COUNTED_ON_GPU,
    compile_figure,
    count_figures,
    new_figures,
)
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.listing import Stopped, check_identities, matched, unable
from tinyllama.harness.gate.pair import (
    BASE,
    CANDIDATE,
    WARM_UP,
    Effort,
    Pair,
    SideError,
)
from tinyllama.harness.gate.setting import Found, Setting, margin_of
from tinyllama.harness.gate.subject import DEVICE
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict, worst

RENAMED = "MISSING: if it is one of them, renamed, restore its name"
DISCARDED = 2  # blocks in which the device was disturbed, before that is the verdict


class Session:
    """One comparison. `run` gives a verdict for each benchmark of either side."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trees = (setting.base, setting.candidate)
        self.effort = setting.effort or Effort.on(setting.device)
        self.found: dict[str, Found] = {}
        self.new: dict[str, Found] = {}  # what the base lacks
        self.left_out: dict[str, int] = {}  # why providers are no benchmarks here, and how many
        self.others: list[Verdict] = []
        self.versions: dict[str, str] = {}
        self.disturbed = self.launches = 0
        self.seconds: dict[str, float] = {}  # that each stage took

    def run(self) -> list[Verdict]:
        try:
            with self._timed("prepare"), self._pair() as pair:
                self._list(pair)
                self._sources()
                self._prepare(pair)
            for name, stage in (
                ("time", self._blocks),
                ("confirm", self._confirm),
                ("attribute", self._move),
            ):
                with self._timed(name):
                    stage()
        except Stopped as stop:
            self.others.append(stop.verdict)
            for one in self._open():
                self._settle(one, stop.verdict.outcome, f"not measured: {stop.verdict.text}")
        if any(verdict.outcome is Outcome.MISSING for verdict in self._verdicts()):
            for one in self.new.values():
                if _is(one, Outcome.NEW):
                    self._settle(one, Outcome.NO_BASELINE, f"new, while others are {RENAMED}")
        return list(self._verdicts())

    def blocks(self) -> Iterator[dict[str, dict[str, float]]]:
        """The statistics of one block after another, without end, of what can be timed.

        Raises Stopped where nothing can be; what failed has its verdict in `found`.
        """
        with self._pair() as pair:
            self._list(pair)
            self._sources()
            self._prepare(pair)
        while self._open():
            before = {one.name: one.blocks for one in self._open()}
            self._block(self._open(), lambda series: series.statistics)
            taken = {
                one.name: {m: series.statistics[-1] for m, series in one.series.items()}
                for one in self._open()
                if one.blocks > before[one.name]
            }
            if taken:  # else the block was discarded
                yield taken

    def report(self) -> dict[str, Any]:
        """All that was measured, for a file. seconds: of each stage; blocks: also those
        that were discarded."""
        return {
            "base": self.setting.base.label,
            "candidate": self.setting.candidate.label,
            "versions": self.versions,
            "seconds": self.seconds,
            "blocks": self.launches,
            "discarded": self.disturbed,
            "left_out": self.left_out,
            "benchmarks": {n: one.report() for n, one in {**self.found, **self.new}.items()},
            "others": [str(verdict) for verdict in self.others],
        }

    # -- the stages -------------------------------------------------------------------------

    def _list(self, pair: Pair) -> None:
        who = pair.each("identity")
        self.versions = who[CANDIDATE]["versions"]
        check_identities(self.setting, pair.trees, who)
        self.left_out = pair.ask(CANDIDATE, "left_out")
        has = pair.each("benchmarks")
        listed = matched(
            self.setting, *({one.name: one for one in has[side]} for side in (BASE, CANDIDATE))
        )
        self.found, self.new = listed.found, listed.new
        self.others += listed.others

    def _sources(self) -> None:
        """What runs the same source with the same versions needs no process."""
        if self.setting.toolchains or self.setting.measure_all:
            return
        for one in self._open():
            base, candidate = (self.setting.sources(t, one.benchmark)[0] for t in self.trees)
            if base == candidate:
                self._settle(one, Outcome.IDENTICAL, "the same source, comments left aside")

    def _prepare(self, pair: Pair) -> None:
        for one in self._open():
            with self._kept(one):
                pair = self._alive(pair)
                pair.each("multiply")  # in a pair that is new; else it is as good as nothing
                seconds = pair.begin(one.benchmark)
                self._prepare_one(pair, one, seconds)
                pair.end(one.benchmark)  # the next one has the memory
        for one in self.new.values():
            with self._kept(one):
                pair = self._alive(pair)
                one.figures = new_figures(*pair.alone(one.benchmark, self.effort))
                self._settle(one, Outcome.NEW, "; ".join(figure.text for figure in one.figures))

    def _prepare_one(self, pair: Pair, one: Found, seconds: Mapping[str, float]) -> None:
        inputs = pair.each("inputs", one.name)
        if inputs[BASE] != inputs[CANDIDATE]:
            text = "its inputs are not those of the base: another benchmark under one name"
            return self._settle(one, Outcome.NO_BASELINE, text)
        counted = pair.each("counted", one.name)
        compiled = pair.each("compiled", one.name)
        allowed = self._allowed(one)
        wanted = COUNTED_ON_GPU if self.setting.device.type != "cpu" else ()
        one.figures += count_figures(counted[BASE], counted[CANDIDATE], allowed, wanted)
        one.figures.append(compile_figure(seconds, lambda metric: allowed(metric)[0]))
        alike = all(figure.outcome is Outcome.SAME for figure in one.figures)
        if self._same_code(one, compiled) and alike:
            text = f"the same code for the host and in {len(compiled[BASE])} launches"
            return self._settle(one, Outcome.IDENTICAL, text)
        for side in (BASE, CANDIDATE):  # one at a time: float64 may take much of the memory
            one.proofs[side] = pair.ask(side, "verify", one.name, timeout=600.0)
        return None

    def _same_code(self, one: Found, compiled: Mapping[str, Sequence[str]]) -> bool:
        if self.setting.toolchains or self.setting.measure_all or not compiled[BASE]:
            return False
        base, candidate = (self.setting.sources(t, one.benchmark)[1] for t in self.trees)
        return base == candidate and compiled[BASE] == compiled[CANDIDATE]

    def _blocks(self) -> None:
        for look in self.setting.looks:
            open_ = self._open()
            if not open_:
                return
            last = self.setting.looks[-1]
            self.setting.say(f"{len(open_)} undecided: blocks up to {look} of {last}")
            while open_ and open_[0].blocks < look:
                self._block(open_, lambda series: series.statistics)
                open_ = self._open()
            for one in open_:
                with self._kept(one):
                    self._look(one, last=look == last)

    def _block(self, which: Sequence[Found], of: Callable[[Series], list[float]]) -> None:
        """One fresh launch of both sides: a statistic of each benchmark and metric."""
        first = self.effort.first
        taken: dict[str, dict[str, float]] = {}
        with self._pair() as pair:
            pair.processor = self.setting.processor
            pair.leading = (BASE, CANDIDATE)[self.launches % 2]
            self.launches += 1
            for one in which:
                with self._kept(one):
                    pair = self._alive(pair)
                    pairs = self.effort.of(one.benchmark)
                    taken[one.name] = pair.statistics(
                        one.benchmark, one.proofs, pairs, max(first, WARM_UP)
                    )
                    first = 0.0
            disturbed = self.setting.watch.during(pair.pids())
        if disturbed:
            self.disturbed += 1
            self.setting.say(f"a block is discarded: {disturbed}")
            if self.disturbed > DISCARDED:
                raise Stopped(Verdict("device", Outcome.BUSY, disturbed))
            return
        for one in which:
            with self._kept(one):
                for metric, value in taken.get(one.name, {}).items():
                    of(self._series(one, metric)).append(value)

    def _look(self, one: Found, *, last: bool) -> None:
        for metric, series in one.series.items():
            if one.settled(metric) is None:
                call = series.look()
                if call is not Call.MORE or last:
                    one.figures.append(series.figure(metric, call))
        if all(one.settled(metric) for metric in one.series):
            self._conclude(one)

    def _conclude(self, one: Found) -> None:
        found = [figure.outcome for figure in one.figures]
        # What is slower for sure is not hidden by a figure that cannot be told.
        slower = Outcome.SLOWER in found and worst(found) is Outcome.INCONCLUSIVE
        outcome = Outcome.SLOWER if slower else worst(found)
        shown = [f for f in one.figures if f.metric in one.series or f.outcome is not Outcome.SAME]
        self._settle(one, outcome, "; ".join(figure.text for figure in shown))

    def _confirm(self) -> None:
        """SLOWER times are measured once more in fresh processes."""
        suspects = [
            one
            for one in self.found.values()
            if _is(one, Outcome.SLOWER)
            and any(f.outcome is Outcome.SLOWER and f.metric in one.series for f in one.figures)
        ]
        if not suspects:
            return
        self.setting.say(f"{len(suspects)} SLOWER: confirmed in {CONFIRM_BLOCKS} fresh blocks")
        while waiting := [
            one for one in suspects if _is(one, Outcome.SLOWER) and one.again < CONFIRM_BLOCKS
        ]:
            self._block(waiting, lambda series: series.again)
        for one in suspects:
            if _is(one, Outcome.SLOWER):  # else it went wrong meanwhile, and that is its verdict
                one.figures = [_confirmed(one, figure) for figure in one.figures]
                self._conclude(one)

    def _move(self) -> None:
        """Which kernels of what is slower moved."""
        slower = [f for f in self.found.values() if _is(f, Outcome.SLOWER)]
        if not slower:
            return
        try:
            with self._pair() as pair:
                for one in slower:
                    with self._kept(one, settle=False):
                        pair = self._alive(pair)
                        pair.begin(one.benchmark)
                        base, candidate = (
                            pair.ask(side, "profiles", one.name, PROFILES)
                            for side in (BASE, CANDIDATE)
                        )
                        one.moved = moved(base, candidate, timed=_slower_on_the_device(one))
                        pair.end(one.benchmark)
        except Stopped as stop:  # it changes no verdict
            for one in slower:
                one.moved = one.moved or [f"not attributed: {stop.verdict.text}"]
        for one in slower:
            assert one.verdict is not None
            self._settle(one, Outcome.SLOWER, "\n    ".join([one.verdict.text, *one.moved]))

    # -- what the stages share --------------------------------------------------------------

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = time.monotonic() - began

    def _open(self) -> list[Found]:
        return [one for one in self.found.values() if one.verdict is None]

    def _settle(self, one: Found, outcome: Outcome, text: str) -> None:
        one.verdict = Verdict(one.name, outcome, text, tuple(one.figures))

    def _verdicts(self) -> Iterator[Verdict]:
        yield from self.others
        for one in (*self.found.values(), *self.new.values()):
            yield one.verdict or Verdict(one.name, Outcome.MISSING, "it came to no verdict")

    def _allowed(self, one: Found) -> Callable[[str], tuple[float, int]]:
        """By metric the share, and the number, of what is accepted."""
        accepted = self.setting.accepted
        return lambda metric: (
            accepted.amount(one.name, metric),
            accepted.more(one.name, metric),
        )

    def _series(self, one: Found, metric: str) -> Series:
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
    def _pair(self) -> Iterator[Pair]:
        """A fresh pair. A base that cannot even begin is no base."""
        try:
            setting = self.setting
            with setting.pairs(self.trees, setting.device, setting.registered) as pair:
                yield pair
        except SideError as error:
            raise Stopped(Verdict(error.side, unable(error.side), _words(error))) from error

    def _alive(self, pair: Pair) -> Pair:
        """The same workers, or where one of them failed, others in their place."""
        if pair.failed:
            pair.restart()
        return pair

    @contextmanager
    def _kept(self, one: Found, *, settle: bool = True) -> Iterator[None]:
        """What goes wrong with one benchmark is its verdict, and the others go on."""
        try:
            yield
        except SideError as error:
            outcome = Outcome.WRONG_RESULT if error.wrong else Outcome.WORKER_DIED
            if settle:
                self._settle(one, outcome, _words(error))
            else:
                one.moved = [f"not attributed: {_words(error)}"]
        except ValueError as error:
            if settle:
                self._settle(one, Outcome.MISSING, str(error))
            else:
                one.moved = [f"not attributed: {error}"]


def _confirmed(one: Found, figure: Figure) -> Figure:
    if figure.outcome is not Outcome.SLOWER or figure.metric not in one.series:
        return figure
    return one.series[figure.metric].confirm(figure)


def _slower_on_the_device(one: Found) -> bool:
    return any(f.metric == DEVICE and f.outcome is Outcome.SLOWER for f in one.figures)


def _is(one: Found, outcome: Outcome) -> bool:
    return one.verdict is not None and one.verdict.outcome is outcome


def _words(error: SideError) -> str:
    last = error.details.strip().splitlines()[-1:]
    return f"{error}" + (f" ({last[0]})" if last and last[0] not in str(error) else "")
