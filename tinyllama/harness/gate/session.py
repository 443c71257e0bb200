"""The whole comparison of a candidate with a base.

    listed      the benchmarks of both sides               -> MISSING
    sources     the source that each benchmark runs, and
                the files that it opens                    -> IDENTICAL, nothing is timed
    prepared    compiled from cold, inputs, counts         -> IDENTICAL kernels; exact figures; NEW
    verified    results held to float64, once a side       -> WRONG RESULT
    blocks      fresh pairs, a look after every fourth     -> SAME, FASTER, SLOWER, INCONCLUSIVE
    confirmed   SLOWER is measured again in fresh pairs    -> SLOWER, or INCONCLUSIVE
    attributed  profiles of both sides of what is SLOWER   -> which kernels changed

Whatever keeps a benchmark from being compared is its verdict: nothing is left out in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from tinyllama.harness.gate.accepted import FILE
from tinyllama.harness.gate.attribution import PROFILES, moved
from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, LOOKS, Call, Rule
from tinyllama.harness.gate.exact import (
    COUNTED_ON_GPU,
    compile_figure,
    count_figures,
    layout_figures,
    new_figures,
)
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.judged import Change, changed_declarations
from tinyllama.harness.gate.listing import Stopped, check_identities, matched, unable
from tinyllama.harness.gate.pair import (
    BASE,
    CANDIDATE,
    READY,
    WARM_UP,
    Block,
    Effort,
    Pair,
    SideError,
    Tree,
)
from tinyllama.harness.gate.setting import BenchmarkState, Setting, margin_of
from tinyllama.harness.gate.subject import DEVICE, held_to_base
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.op_contender import WrongResultError
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict, worst

RENAMED = "MISSING: if it is one of them, renamed, restore its name"
MAX_DISCARDED = 2  # blocks on a disturbed device; one more, and the verdict is BUSY


class _Timed(NamedTuple):
    """What a block gives a benchmark: its turns; by side a call's seconds; figures."""

    block: Block
    paces: dict[str, float]
    layouts: list[Figure]


class Session:
    """One comparison. `run` returns a verdict on each benchmark of either side."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trees = (setting.base, setting.candidate)
        self.effort = setting.effort or Effort.on(setting.device)
        self.found: dict[str, BenchmarkState] = {}
        self.new: dict[str, BenchmarkState] = {}  # what the base lacks
        self.left_out: dict[str, int] = {}  # by reason, how many providers are not timed here
        self.others: list[Verdict] = []
        self.versions: dict[str, str] = {}
        self.disturbed = self.launches = 0
        self.changed = list(setting.changed)  # of what judges
        self.unidentified: Mapping[str, str] = {}  # by benchmark, why it is no IDENTICAL
        self.seconds: dict[str, float] = {}  # by stage
        self._verifying = Lock()
        self.stage = ""
        self.contents = {tree.name: self._contents(tree) for tree in self.trees}

    def run(self) -> list[Verdict]:
        try:
            with self._timed("prepare"), self._pairs() as (pair,):
                self._list(pair)
                self._sources()
                self._prepare(pair)
            for name, stage in (
                ("time", self._blocks),
                ("confirm", self._confirm),
                ("attribute", self._attribute),
            ):
                with self._timed(name):
                    stage()
            self._untampered()
        except Stopped as stop:
            self.others.append(stop.verdict)
            for one in self._undecided():
                self._settle(one, stop.verdict.outcome, f"not measured: {stop.verdict.text}")
        if any(verdict.outcome is Outcome.MISSING for verdict in self._verdicts()):
            for one in self.new.values():
                if _has_outcome(one, Outcome.NEW):
                    self._settle(one, Outcome.NO_BASELINE, f"new, while others are {RENAMED}")
        return list(self._verdicts())

    def blocks(self) -> Iterator[dict[str, dict[str, float]]]:
        """The statistics of block after block, without end, of the benchmarks that can be timed.

        Raises Stopped where none can be. Those that failed have their verdicts in `found`.
        """
        with self._pairs() as (pair,):
            self._list(pair)
            self._sources()
            self._prepare(pair)
        while self._undecided():
            before = {one.name: one.blocks for one in self._undecided()}
            self._block(self._undecided(), lambda series: series.statistics)
            taken = {
                one.name: {m: series.statistics[-1] for m, series in one.series.items()}
                for one in self._undecided()
                if one.blocks > before[one.name]
            }
            if taken:  # a discarded block has none
                yield taken

    def report(self) -> dict[str, Any]:
        """All that was measured, for a file. seconds: by stage. blocks: discarded ones too."""
        return {
            "base": self.setting.base.label,
            "candidate": self.setting.candidate.label,
            "versions": self.versions,
            "seconds": self.seconds,
            "blocks": self.launches,
            "discarded": self.disturbed,
            "left_out": self.left_out,
            "unidentified": dict(self.unidentified),
            "judge_changed": [asdict(one) for one in self.changed],
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
        if not self.setting.toolchains:
            declared = pair.each("declarations")
            self.changed += changed_declarations(declared[BASE], declared[CANDIDATE])
        if anew := [one for one in self.changed if one not in self.setting.accepted.changes]:
            self.others.append(Verdict("judge", Outcome.JUDGE_CHANGED, _accept(anew)))

    def _sources(self) -> None:
        """Benchmarks that run the same source with the same versions are IDENTICAL."""
        if self.setting.toolchains or self.setting.measure_all:
            return
        alike = [one.name for one in self._undecided() if self._alike(one, whole=False)]
        if alike and self.setting.unidentified is not None:
            self.setting.doing(f"{self.stage}: what {len(alike)} benchmarks open")
            every = [one.benchmark for one in (*self.found.values(), *self.new.values())]
            found = self.setting.unidentified(self.trees, every)
            self.unidentified = {name: found[name] for name in alike if name in found}
            self._untampered()
        for one in self._undecided():
            if self._alike(one, whole=True) and one.name not in self.unidentified:
                self._settle(one, Outcome.IDENTICAL, "the same source, comments aside")

    def _prepare(self, pair: Pair) -> None:
        with self._beside(pair, len(self._undecided())) as pairs:
            waiting = iter(sorted(self._undecided(), key=lambda one: not one.benchmark.factory))
            with ThreadPoolExecutor(len(pairs)) as pool:  # steps first, since they take longest
                for done in [pool.submit(self._prepare_some, each, waiting) for each in pairs]:
                    done.result()
        for one in self.new.values():  # their times are read, with nothing else at work
            with self._errors_as_verdict(one):
                pair = self._working(pair)
                seconds, counted, layouts = pair.alone(one.benchmark, self.effort)
                one.figures = [*new_figures(seconds, counted), *self._layouts(one, layouts)]
                outcome = worst([Outcome.NEW, *(figure.outcome for figure in one.figures)])
                self._settle(one, outcome, "; ".join(figure.text for figure in one.figures))

    @contextmanager
    def _beside(self, pair: Pair, benchmarks: int) -> Iterator[list[Pair]]:
        """The pair, and more of them that prepare benchmarks at the same time.

        Each compiles into a cache of its own: code that another pair compiled meanwhile, perhaps
        for one side only, would change the seconds of a first call. Blocks find all of it.
        """
        more = min(self.setting.at_once, benchmarks) - 1
        if more < 1:
            yield [pair]
            return
        with self._pairs(more) as others:
            for number, other in enumerate(others):
                other.compile_apart(str(number))
            yield [pair, *others]
            for other in others:
                other.merge_caches(self.trees)

    def _prepare_some(self, pair: Pair, waiting: Iterator[BenchmarkState]) -> None:
        for one in waiting:
            with self._errors_as_verdict(one), one.takes("prepare"):
                pair = self._working(pair)
                pair.each("warm_up_blas")  # a pair may be new
                seconds = pair.begin(one.benchmark)
                self._prepare_one(pair, one, seconds)
                pair.end(one.benchmark)  # the next one has the memory

    def _prepare_one(self, pair: Pair, one: BenchmarkState, seconds: Mapping[str, float]) -> None:
        inputs = pair.each("inputs", one.name)
        if inputs[BASE] != inputs[CANDIDATE]:
            text = (
                "its inputs are not those of the base: give what is another benchmark another name"
            )
            return self._settle(one, Outcome.NO_BASELINE, text)
        counted = pair.each("counted", one.name)
        compiled = pair.each("compiled", one.name)
        allowed = self._allowed(one)
        wanted = COUNTED_ON_GPU if self.setting.device.type != "cpu" else ()
        one.figures += count_figures(counted[BASE], counted[CANDIDATE], allowed, wanted)
        one.figures.append(compile_figure(seconds, lambda metric: allowed(metric)[0]))
        alike = all(figure.outcome is Outcome.SAME for figure in one.figures)
        if self._same_code(one, compiled) and alike:
            text = f"the same host code, and the same kernels in {len(compiled[BASE])} launches"
            return self._settle(one, Outcome.IDENTICAL, text)
        with self._verifying:  # one side of one benchmark: float64 may take much of the memory
            for side in (BASE, CANDIDATE):
                one.proofs[side] = pair.ask(side, "verify", one.name, timeout=600.0)
        if not one.benchmark.factory:
            one.proofs[CANDIDATE] = _held(one.proofs)
        if layouts := tuple(one.benchmark.layouts):
            pair.ask(CANDIDATE, "compile_layouts", one.name, layouts, timeout=READY)
        return None

    def _layouts(self, one: BenchmarkState, found: Mapping[str, Ratio]) -> list[Figure]:
        return layout_figures(found, one.benchmark.layouts, self._allowed(one)("layouts")[0])

    def _same_code(self, one: BenchmarkState, compiled: Mapping[str, Sequence[str]]) -> bool:
        if self.setting.toolchains or self.setting.measure_all or not compiled[BASE]:
            return False
        alike = self._alike(one, whole=False) and one.name not in self.unidentified
        return alike and compiled[BASE] == compiled[CANDIDATE]

    def _alike(self, one: BenchmarkState, *, whole: bool) -> bool:
        """Whether both sides have the same source; not ``whole``: kernels' bodies aside."""
        part = 0 if whole else 1
        base, candidate = (self.setting.sources(t, one.benchmark)[part] for t in self.trees)
        return base == candidate

    def _blocks(self) -> None:
        for look in LOOKS:
            open_ = self._undecided()
            if not open_:
                return
            self.setting.say(f"{len(open_)} undecided: blocks up to {look} of {LOOKS[-1]}")
            while open_ and open_[0].blocks < look:
                self._block(open_, lambda series: series.statistics)
                open_ = self._undecided()
            for one in open_:
                with self._errors_as_verdict(one):
                    self._look(one, last=look == LOOKS[-1])

    def _block(self, which: Sequence[BenchmarkState], of: Callable[[Series], list[float]]) -> None:
        """A fresh launch of both sides: a statistic of each benchmark and metric.

        As many pairs as may work at once each make a benchmark ready; then, with nothing else at
        work, one after the other is timed.
        """
        found: dict[str, _Timed] = {}
        count = max(1, min(self.setting.at_once, len(which)))
        with self._pairs(count) as pairs, ThreadPoolExecutor(count) as pool:
            for pair in pairs:
                pair.processor = self.setting.processor
                pair.leading = (BASE, CANDIDATE)[self.launches % 2]
            self.launches += 1
            for place in range(0, len(which), count):
                some = which[place : place + count]
                warm_up = max(WARM_UP, 0.0 if place else self.effort.first)
                ready = list(pool.map(partial(self._make_ready, warm_up=warm_up), pairs, some))
                for pair, one, is_ready in zip(pairs, some, ready, strict=False):
                    if not is_ready:
                        continue
                    with self._errors_as_verdict(one), one.takes("time"):
                        found[one.name] = self._timed_once(pair, one)
            disturbed = self.setting.watch.during([pid for pair in pairs for pid in pair.pids()])
        if disturbed:
            self.disturbed += 1
            self.setting.say(f"a block is discarded: {disturbed}")
            if self.disturbed > MAX_DISCARDED:
                raise Stopped(Verdict("device", Outcome.BUSY, disturbed))
            return
        for one in which:
            with self._errors_as_verdict(one):
                if (timed := found.get(one.name)) is not None:
                    one.paces = timed.paces
                    one.figures += timed.layouts
                    for metric, value in timed.block.statistics.items():
                        series = self._series(one, metric)
                        of(series).append(value)
                        if of(series) is series.statistics:
                            series.excesses.append(timed.block.excesses[metric])

    def _make_ready(self, pair: Pair, one: BenchmarkState, warm_up: float) -> bool:
        """Whether a benchmark is ready to be timed; an error is its verdict."""
        ready = False
        with self._errors_as_verdict(one), one.takes("make ready"):
            self._working(pair).make_ready(one.benchmark, one.proofs, warm_up)
            ready = True
        return ready

    def _timed_once(self, pair: Pair, one: BenchmarkState) -> _Timed:
        """The statistics of a benchmark that is ready. In its first block also the seconds of a
        call by this process's clock, the times on other layouts, and a turn on new values."""
        paces, layouts, first = one.paces, [], not one.series
        if first:
            if not one.benchmark.factory:
                paces = {side: pair.pace(side, one.benchmark) for side in (BASE, CANDIDATE)}
            layouts = self._layouts(one, pair.layouts(one.benchmark))
        pairs = self.effort.of(one.benchmark)
        block = pair.block(one.benchmark, pairs, paces, new_values=first)
        return _Timed(block, paces, layouts)

    def _look(self, one: BenchmarkState, *, last: bool) -> None:
        for metric, series in one.series.items():
            if one.settled(metric) is None:
                call = series.look()
                slow = series.slow_turns(metric)
                one.figures += [slow] if slow else []
                waits = call is Call.MORE or (series.suspect and call is not Call.SLOWER)
                if slow or last or not waits:
                    one.figures.append(series.figure(metric, call))
        if all(one.settled(metric) for metric in one.series):
            self._conclude(one)

    def _conclude(self, one: BenchmarkState) -> None:
        found = [figure.outcome for figure in one.figures]
        # An inconclusive figure does not hide another that is certainly slower.
        slower = Outcome.SLOWER in found and worst(found) is Outcome.INCONCLUSIVE
        outcome = Outcome.SLOWER if slower else worst(found)
        shown = [f for f in one.figures if f.metric in one.series or f.outcome is not Outcome.SAME]
        self._settle(one, outcome, "; ".join(figure.text for figure in shown))

    def _confirm(self) -> None:
        """Measure SLOWER times again in fresh processes."""
        suspects = [
            one
            for one in self.found.values()
            if _has_outcome(one, Outcome.SLOWER)
            and any(f.outcome is Outcome.SLOWER and f.metric in one.series for f in one.figures)
        ]
        if not suspects:
            return
        self.setting.say(f"{len(suspects)} SLOWER: confirmed in {CONFIRM_BLOCKS} fresh blocks")
        while waiting := [
            one
            for one in suspects
            if _has_outcome(one, Outcome.SLOWER) and one.again < CONFIRM_BLOCKS
        ]:
            self._block(waiting, lambda series: series.again)
        for one in suspects:
            if _has_outcome(one, Outcome.SLOWER):  # an error meanwhile is its verdict
                one.figures = [_confirmed(one, figure) for figure in one.figures]
                self._conclude(one)

    def _attribute(self) -> None:
        """Find out which kernels of the SLOWER benchmarks changed."""
        slower = [f for f in self.found.values() if _has_outcome(f, Outcome.SLOWER)]
        if not slower:
            return
        try:
            with self._pairs() as (pair,):
                for one in slower:
                    with self._errors_as_verdict(one, settle=False):
                        pair = self._working(pair)
                        pair.begin(one.benchmark)
                        base, candidate = (
                            pair.ask(side, "profiles", one.name, PROFILES)
                            for side in (BASE, CANDIDATE)
                        )
                        one.moved = moved(base, candidate, timed=_slower_on_the_device(one))
                        pair.end(one.benchmark)
        except Stopped as stop:  # no verdict changes
            for one in slower:
                one.moved = one.moved or [f"not attributed: {stop.verdict.text}"]
        for one in slower:
            assert one.verdict is not None
            self._settle(one, Outcome.SLOWER, "\n    ".join([one.verdict.text, *one.moved]))

    # -- what the stages share --------------------------------------------------------------

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began, self.stage = time.monotonic(), stage
        self.setting.doing(f"{stage}: starting both sides")
        try:
            yield
        finally:
            self.seconds[stage] = time.monotonic() - began

    def _doing(self, one: BenchmarkState) -> str:
        every = [*self.found.values(), *self.new.values()]
        settled = sum(each.verdict is not None for each in every)
        block = f", block {self.launches}" if self.launches else ""
        return f"{self.stage}: {one.name}; {settled} of {len(every)} settled{block}"

    def _undecided(self) -> list[BenchmarkState]:
        return [one for one in self.found.values() if one.verdict is None]

    def _settle(self, one: BenchmarkState, outcome: Outcome, text: str) -> None:
        one.verdict = Verdict(one.name, outcome, text, tuple(one.figures))

    def _verdicts(self) -> Iterator[Verdict]:
        yield from self.others
        for one in (*self.found.values(), *self.new.values()):
            yield one.verdict or Verdict(one.name, Outcome.MISSING, "no verdict was reached")

    def _allowed(self, one: BenchmarkState) -> Callable[[str], tuple[float, int]]:
        """By metric, the accepted share and the accepted number."""
        accepted = self.setting.accepted
        return lambda metric: (
            accepted.amount(one.name, metric),
            accepted.more(one.name, metric),
        )

    def _series(self, one: BenchmarkState, metric: str) -> Series:
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
    def _pairs(self, count: int = 1) -> Iterator[list[Pair]]:
        """Fresh pairs. Where a side cannot start, the comparison stops: NO BASE for the base."""
        self._untampered()
        try:
            setting = self.setting
            with setting.pairs(self.trees, setting.device, setting.registered, count) as pairs:
                yield pairs
        except SideError as error:
            harness = any(one.name.startswith("tinyllama/harness/") for one in self.changed)
            unread = error.side == CANDIDATE and harness
            outcome = Outcome.JUDGE_CHANGED if unread else unable(error.side)
            raise Stopped(Verdict(error.side, outcome, _words(error))) from error

    def _contents(self, tree: Tree) -> str:
        return "" if self.setting.contents is None else self.setting.contents(tree)

    def _untampered(self) -> None:
        """Raise Stopped where a tree is not what it was at the start."""
        for tree in self.trees:
            if self._contents(tree) != self.contents[tree.name]:
                text = "its files were changed while it was compared: find what writes into them"
                raise Stopped(Verdict(tree.name, Outcome.TAMPERED, text))

    def _working(self, pair: Pair) -> Pair:
        """The pair, with fresh workers where one of them failed."""
        if pair.failed:
            pair.restart()
        return pair

    @contextmanager
    def _errors_as_verdict(self, one: BenchmarkState, *, settle: bool = True) -> Iterator[None]:
        """An error with one benchmark is its verdict; the others continue. settle: without it, the
        error explains only why nothing is attributed."""
        self.setting.doing(self._doing(one))
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


def _confirmed(one: BenchmarkState, figure: Figure) -> Figure:
    if figure.outcome is not Outcome.SLOWER or figure.metric not in one.series:
        return figure
    return one.series[figure.metric].confirm(figure)


def _slower_on_the_device(one: BenchmarkState) -> bool:
    return any(f.metric == DEVICE and f.outcome is Outcome.SLOWER for f in one.figures)


def _has_outcome(one: BenchmarkState, outcome: Outcome) -> bool:
    return one.verdict is not None and one.verdict.outcome is outcome


def _held(proofs: Mapping[str, Any]) -> Any:
    """The candidate's proofs, held to the base's reference. Raises SideError."""
    try:
        return held_to_base(proofs[BASE], proofs[CANDIDATE])
    except WrongResultError as error:
        types = [f"{WrongResultError.__module__}.{WrongResultError.__qualname__}"]
        raise SideError(CANDIDATE, WorkerError(str(error), types=types)) from error


def _accept(changes: Sequence[Change]) -> str:
    return (
        "the base's judged, since these differ and would judge: "
        f"{', '.join(map(str, changes))}; accept each by name and digest in [[judge]] tables of "
        f"{FILE}, which a reviewer sees"
    )


def _words(error: SideError) -> str:
    last = error.details.strip().splitlines()[-1:]
    return f"{error}" + (f" ({last[0]})" if last and last[0] not in str(error) else "")
