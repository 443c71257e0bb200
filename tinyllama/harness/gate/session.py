"""The whole comparison of a candidate with a base.

    listed      the benchmarks of both sides               -> MISSING
    affected    what the change can reach                  -> IDENTICAL, nothing is timed
    prepared    compiled from cold, inputs, counts         -> IDENTICAL kernels; exact figures; NEW
    verified    results held to float64 and to the base's  -> WRONG RESULT
    blocks      fresh pairs, a look after every fourth     -> SAME, FASTER, SLOWER, INCONCLUSIVE
    confirmed   SLOWER is measured again in fresh pairs    -> SLOWER, or INCONCLUSIVE
    decided     once one is SLOWER                         -> the others are NOT DECIDED
    audited     some IDENTICAL ones are timed all the same -> IDENTICAL, or SLOWER
    attributed  profiles of both sides of what is SLOWER   -> which kernels changed

Whatever keeps a benchmark from being compared is its verdict: nothing is left out in silence.
"""

import math
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import mean, median
from typing import Any

from tinyllama.harness.gate.attribution import PROFILES, moved
from tinyllama.harness.gate.benchmarks import (
    BASE,
    CANDIDATE,
    Stopped,
    check_identities,
    matched,
)
from tinyllama.harness.gate.counters import (
    COMPILE_RATIO,
    COMPILE_SECONDS,
    COUNTED_ON_GPU,
    compile_figure,
    count_figures,
    layout_figures,
    new_figures,
)
from tinyllama.harness.gate.declarations import changed_declarations
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE, Series, margin_of
from tinyllama.harness.gate.pair import READY, Effort, Pair, SideError, Tree
from tinyllama.harness.gate.sequential_test import CONFIRM_BLOCKS, LOOKS, Call, Rule
from tinyllama.harness.gate.setting import Affected, BenchmarkState, Setting
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.gate.wave import Wave, sizes
from tinyllama.harness.machine.worker import all_ended
from tinyllama.harness.records.results import is_number
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict, worst

MAX_DISCARDED = 2  # waves on a disturbed device; one more, and the verdict is BUSY
AUDIT_LOOKS = LOOKS[:2]
FIRST_CALL_SECONDS = 0.5  # beside the ratio of compile times, with compiled code at hand
_ALIKE = "the same source, comments aside"
_RENAMED = "new, while others are MISSING: if it is one of them, renamed, restore its name"


class Session:
    """One comparison. `run` returns a verdict on each benchmark of either side.

    found: the benchmarks of both sides; new: what the base lacks. launched: blocks. disturbed:
    waves. discarded: blocks.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trees = (setting.base, setting.candidate)
        self.effort = setting.effort or Effort.on(setting.device)
        self.compared: dict[str, BenchmarkState] = {}
        self.new: dict[str, BenchmarkState] = {}
        self.affected: Mapping[str, Affected] = {}
        self.further_verdicts: list[Verdict] = []
        self.versions: dict[str, str] = {}
        self.launched = self.disturbed = self.discarded = 0
        self.changed: list[str] = []  # of what ops declare, where the base's holds
        self.seconds = Stages(setting.seconds)  # those before the session too
        self.stage = ""
        self._device_checks: set[Callable[[], str | None]] = set()  # of the device, once each
        with self.seconds.of("trees"):
            self._contents = {tree.name: self._contents_of(tree) for tree in self.trees}

    def run(self) -> list[Verdict]:
        try:
            self._decide()
            with self.timed("attribute"):
                self._attribute()
            self._check_untouched()
        except Stopped as stop:
            self.further_verdicts.append(stop.verdict)
            for state in [*self.undecided(), *filter(unconfirmed, self.compared.values())]:
                text = f"not measured: {stop.verdict.text}"
                self.settle(state, stop.verdict.outcome, text)
        if any(verdict.outcome is Outcome.MISSING for verdict in self.verdicts()):
            for state in self.new.values():
                if has_outcome(state, Outcome.NEW):
                    self.settle(state, Outcome.NO_BASELINE, _RENAMED)
        return list(self.verdicts())

    def blocks(self, count: int) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
        """Block after block, up to a count: the name of its wave, and the statistics of the
        benchmarks that can be timed.

        Raises Stopped where none can be. Those that failed have their verdicts in `found`.
        """
        with self.timed("prepare"), self.pairs() as (pair,):
            self._list(pair)
            self._prepare(pair, self.undecided())
        while count > 0 and (states := self.undecided()):
            taken = self._wave(states, min(self.setting.at_once, count))
            count -= taken
            name = secrets.token_hex(8)
            for place in range(-taken, 0) if self.undecided() else ():
                statistics = {
                    state.name: {m: series.statistics[place] for m, series in state.series.items()}
                    for state in self.undecided()
                }
                yield name, statistics

    def _decide(self) -> None:
        """Time the ops whose own files differ first: a merge that is SLOWER is mostly decided by
        them."""
        with self.timed("prepare"), self.pairs() as (pair,):
            self._list(pair)
            self._find_identical()
            nearest = self._nearest()
            first = nearest if self.setting.at_once == 1 else []  # else all at the same time
            self._prepare(pair, first or self.undecided())
            if self._wrong_decides():
                return
            if not first:
                self._measure_new(pair)
        if nearest and self._look_at(nearest, LOOKS):
            return
        if first and self.unsettled():
            with self.timed("prepare"), self.pairs() as (pair,):
                self._prepare(pair, self.undecided())
                if self._wrong_decides():
                    return
                self._measure_new(pair)
        if not self._look_at([], LOOKS) and self.setting.audit:
            self._audit()

    def _wrong_decides(self) -> bool:
        """Whether a result is wrong, so that no time can make the merge green."""
        wrong = [s for s in self.compared.values() if has_outcome(s, Outcome.WRONG_RESULT)]
        if not wrong or self.setting.all_verdicts:
            return False
        for state in self.unsettled():
            text = f"the results of {wrong[0].name} are wrong, which decides the merge"
            self.settle(state, Outcome.NOT_DECIDED, text)
        return True

    # -- verdicts ---------------------------------------------------------------------------

    def undecided(self) -> list[BenchmarkState]:
        return [state for state in self.compared.values() if state.verdict is None]

    def unsettled(self) -> list[BenchmarkState]:
        """The undecided ones, and those that are NEW and not measured yet."""
        new = [state for state in self.new.values() if state.verdict is None]
        return [*self.undecided(), *new]

    def others_wait(self, states: Sequence[BenchmarkState]) -> bool:
        """Whether other benchmarks than these are undecided."""
        return len(self.undecided()) > len(states)

    def settle(self, state: BenchmarkState, outcome: Outcome, text: str) -> None:
        state.verdict = Verdict(state.name, outcome, text, tuple(state.figures))

    def verdicts(self) -> Iterator[Verdict]:
        yield from self.further_verdicts
        for state in (*self.compared.values(), *self.new.values()):
            yield state.verdict or Verdict(state.name, Outcome.MISSING, "no verdict was reached")

    def interrupted(self, why: str) -> list[Verdict]:
        """The verdicts of a comparison that did not end: what is undecided is NOT DECIDED, and so
        is what is SLOWER and was not confirmed."""
        for state in [*self.unsettled(), *filter(unconfirmed, self.compared.values())]:
            self.settle(state, Outcome.NOT_DECIDED, f"{why} ended the gate; {_so_far(state)}")
        return list(self.verdicts())

    def allowed(self, state: BenchmarkState) -> Callable[[str], tuple[float, int]]:
        """By metric, the accepted share and the accepted number."""
        accepted, name = self.setting.accepted, state.name
        return lambda metric: (accepted.amount(name, metric), accepted.more(name, metric))

    @contextmanager
    def errors_as_verdict(self, state: BenchmarkState) -> Iterator[None]:
        """An error with one benchmark is its verdict; the others continue."""
        states = [*self.compared.values(), *self.new.values()]
        settled = sum(each_state.verdict is not None for each_state in states)
        block = f", block {self.launched}" if self.launched else ""
        text = f"{self.stage}: {state.name}; {settled} of {len(states)} settled{block}"
        self.setting.doing(text)
        try:
            yield
        except SideError as error:
            if all_ended():
                raise
            accused = error.wrong and error.side == CANDIDATE  # the base's error is not its fault
            outcome = Outcome.WRONG_RESULT if accused else Outcome.NOT_JUDGED
            self.settle(state, outcome, _words(error))
        except ValueError as error:
            self.settle(state, Outcome.MISSING, str(error))

    def report(self) -> dict[str, Any]:
        """All that was measured, for a file. seconds: by stage. blocks: discarded ones too."""
        return {
            "base": self.setting.base.label,
            "candidate": self.setting.candidate.label,
            "versions": self.versions,
            "seconds": self.seconds,
            "blocks": self.launched,
            "discarded": self.discarded,
            "affected": {name: affected.why for name, affected in self.affected.items()},
            "judge_changed": self.changed,
            "benchmarks": {n: state.report() for n, state in {**self.compared, **self.new}.items()},
            "others": [str(verdict) for verdict in self.further_verdicts],
        }

    # -- processes, trees, time -------------------------------------------------------------

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

    @contextmanager
    def pairs(self, count: int = 1) -> Iterator[list[Pair]]:
        """Fresh pairs. Where a side cannot start, the comparison stops: NO BASE for the base."""
        setting = self.setting
        try:
            starting = ExitStack()
            starting.enter_context(self.part("start processes"))
            arguments = (self.trees, setting.device, setting.registered, count)
            with starting, setting.pairs(*arguments) as pairs:
                starting.close()
                yield pairs
        except SideError as error:
            if all_ended():
                raise
            raise Stopped(Verdict(error.side, Outcome.NOT_JUDGED, _words(error))) from error

    def working(self, pair: Pair) -> Pair:
        """The pair, with fresh workers where one of them failed."""
        if pair.failed:
            pair.restart()
        return pair

    def _ask_device(self, may: Callable[[], str | None]) -> None:
        """Ask once whether the device may be used, or timed. Raises Stopped."""
        if may not in self._device_checks:
            self._device_checks.add(may)
            if reason := may():
                raise Stopped(Verdict("device", Outcome.BUSY, reason))

    def _contents_of(self, tree: Tree) -> str:
        return "" if self.setting.contents is None else self.setting.contents(tree)

    def _check_untouched(self) -> None:
        """Raise Stopped where a tree is not what it was at the start."""
        for tree in self.trees:
            if self._contents_of(tree) != self._contents[tree.name]:
                text = "its files were changed while it was compared: find what writes into them"
                raise Stopped(Verdict(tree.name, Outcome.NOT_JUDGED, text))

    # -- listed, affected -------------------------------------------------------------------

    def _list(self, pair: Pair) -> None:
        """The benchmarks of both sides. Raises Stopped where they cannot be compared."""
        with self.part("list benchmarks"):
            who = pair.ask_both("identity")
            self.versions = who[CANDIDATE]["versions"]
            check_identities(
                {name: tree.root for name, tree in pair.trees.items()},
                who,
                toolchains=self.setting.toolchains,
                one_tree=self.setting.toolchains or self.setting.measure_all,
            )
            has = pair.ask_both("benchmarks")
            base, candidate = (
                {benchmark.name: benchmark for benchmark in has[side]} for side in (BASE, CANDIDATE)
            )
            listed = matched(
                base,
                candidate,
                self.setting.accepted,
                ops=self.setting.ops,
                only=self.setting.only,
                toolchains=self.setting.toolchains,
            )
        blind = self.setting.measure_all or self.setting.toolchains
        if not blind:
            self.affected = self.setting.affected([*listed.common.values(), *listed.new.values()])
        edited = {name for name, affected in self.affected.items() if affected.op_differs}
        compared = {n: b for n, b in listed.common.items() if not b.further or n in edited}
        self.compared = {name: BenchmarkState(b) for name, b in compared.items()}
        self.new = {n: BenchmarkState(b) for n, b in listed.new.items() if not b.further}
        self.further_verdicts += listed.verdicts
        if not self.setting.toolchains:
            declared = pair.ask_both("declarations")
            self.changed += changed_declarations(declared[BASE], declared[CANDIDATE])
        self._check_import({side: who[side].get("import_seconds", 0.0) for side in who})

    def _check_import(self, seconds: Mapping[str, float]) -> None:
        """What the import of all ops takes in a fresh process, which is measured once more before
        it is SLOWER."""

        def limit() -> float:
            return seconds[BASE] * COMPILE_RATIO + COMPILE_SECONDS

        if seconds[CANDIDATE] <= limit():
            return
        with self.pairs() as (pair,):
            again = pair.ask_both("identity")
        seconds = {side: min(seconds[side], again[side]["import_seconds"]) for side in seconds}
        if seconds[CANDIDATE] > limit():
            text = f"{seconds[BASE]:.1f} -> {seconds[CANDIDATE]:.1f} s, allowed {limit():.1f}"
            self.further_verdicts.append(
                Verdict("import", Outcome.SLOWER, f"the import of the ops: {text}")
            )

    def _find_identical(self) -> None:
        if self.setting.measure_all or self.setting.toolchains:
            return
        for state in self.undecided():
            if state.name not in self.affected:
                self.settle(state, Outcome.IDENTICAL, _ALIKE)

    def _nearest(self) -> list[BenchmarkState]:
        """The benchmarks that differ in a file of their own op, if they are at most half of those
        that differ. They are timed first: once one of them is SLOWER, the merge is decided and the
        others need no preparation."""
        differ = self.undecided()
        edited = [
            s for s in differ if (a := self.affected.get(s.name)) is not None and a.op_differs
        ]
        return [] if self.setting.all_verdicts or 2 * len(edited) > len(differ) else edited

    # -- prepared, verified -----------------------------------------------------------------

    def _prepare(
        self, pair: Pair, states: Sequence[BenchmarkState], *, audit: bool = False
    ) -> None:
        """Compile, count and verify what is undecided of these, several at the same time."""
        waiting = [state for state in states if state.verdict is None and not state.proofs]
        if not waiting:
            return
        self._ask_device(self.setting.use_device)
        again: list[BenchmarkState] = []
        with self.part("compile and verify"), ExitStack() as stack:
            pairs = [pair]
            if more := min(self.setting.at_once, len(waiting)) - 1:
                pairs += stack.enter_context(self.pairs(more))
            pool = stack.enter_context(ThreadPoolExecutor(len(pairs)))
            # A training step takes longest.
            queue = iter(sorted(waiting, key=lambda state: not state.benchmark.factory))
            futures = [
                pool.submit(self._prepare_some, preparing, queue, again if more else None, audit)
                for preparing in pairs
            ]
            with self.setting.ahead():
                for future in futures:
                    future.result()
        self._prepare_some(pair, iter(again), None, audit)  # alone, they find more memory
        self._compile_again(waiting)

    def _prepare_some(
        self,
        pair: Pair,
        queue: Iterator[BenchmarkState],
        again: list[BenchmarkState] | None,
        audit: bool,
    ) -> None:
        """again: takes what found no memory beside other pairs; None: no other works, so that is
        the verdict."""
        for state in queue:
            with self.errors_as_verdict(state):
                try:
                    pair = self.working(pair)
                    pair.ask_both("warm_up_blas")  # a pair may be new
                    self._prepare_benchmark(pair, state, audit)
                    pair.end(state.benchmark)  # the next one has the memory
                except SideError as error:
                    if again is None or not error.memory:
                        raise
                    state.figures, state.proofs = [], {}
                    again.append(state)

    def _prepare_benchmark(self, pair: Pair, state: BenchmarkState, audit: bool) -> None:
        benchmark, name = state.benchmark, state.name
        seconds = pair.begin(benchmark)
        inputs = pair.ask_both("inputs", name)
        if inputs[BASE] != inputs[CANDIDATE]:
            text = (
                "its inputs are not those of the base: give what is another benchmark another name"
            )
            return self.settle(state, Outcome.NO_BASELINE, text)
        if benchmark.untimed:
            state.proofs = pair.verify(benchmark)
            text = f"its results are verified, and not timed: {benchmark.untimed}"
            return self.settle(state, Outcome.SAME, text)
        counted = pair.ask_both("counted", name)
        compiled = pair.ask_both("compiled", name)
        allowed = self.allowed(state)
        metrics = COUNTED_ON_GPU if self.setting.device.type != "cpu" else ()
        state.figures += count_figures(counted[BASE], counted[CANDIDATE], allowed, metrics)
        state.figures.append(self._compile_figure(state, seconds))
        alike = all(figure.outcome is Outcome.SAME for figure in state.figures)
        affected = self.affected.get(name)
        kernels_alone = affected is not None and not affected.host
        if alike and kernels_alone and compiled[BASE] == compiled[CANDIDATE] != [] and not audit:
            count = len(compiled[BASE])
            text = f"the same host code, and the same kernels in {count} launches"
            return self.settle(state, Outcome.IDENTICAL, text)
        state.proofs = pair.verify(benchmark)
        if layouts := tuple(benchmark.layouts):
            pair.ask(CANDIDATE, "compile_layouts", name, layouts, timeout=READY)
        return None

    def _compile_figure(self, state: BenchmarkState, seconds: Mapping[str, float]) -> Figure:
        allowed = self.allowed(state)
        return compile_figure(seconds, lambda metric: allowed(metric)[0])

    def _compile_again(self, states: Sequence[BenchmarkState]) -> None:
        """Measure compile times that are SLOWER again, with nothing else at work."""
        slower = [s for s in states if (f := s.settled(_COMPILE)) and f.outcome is Outcome.SLOWER]
        if not slower:
            return
        with self.pairs() as (pair,):
            for number, state in enumerate(slower):
                with self.errors_as_verdict(state):
                    pair = self.working(pair)
                    for tree in self.trees:
                        folder = tree.caches.with_name(f"{tree.caches.name}-again-{number}")
                        pair.ask(tree.name, "use_caches", str(folder))
                    again = self._compile_figure(state, pair.begin(state.benchmark))
                    pair.end(state.benchmark)
                    state.figures = [again if f.metric == _COMPILE else f for f in state.figures]

    def _measure_new(self, pair: Pair) -> None:
        """Measure what the base lacks, with nothing else at work."""
        for state in self.new.values():
            if state.verdict is not None:
                continue
            self._ask_device(self.setting.use_device)
            if not state.benchmark.untimed:
                self._ask_device(self.setting.wait_until_idle)
            with self.errors_as_verdict(state):
                pair = self.working(pair)
                seconds, counted, layouts = pair.alone(state.benchmark, self.effort)
                accepted = self.allowed(state)("layouts")[0]
                bars = layout_figures(layouts, state.benchmark.layouts, accepted)
                state.figures = [*new_figures(seconds, counted), *bars]
                outcome = worst([Outcome.NEW, *(figure.outcome for figure in state.figures)])
                untimed = [f"not timed: {state.benchmark.untimed}"] * bool(state.benchmark.untimed)
                texts = [*(figure.text for figure in state.figures), *untimed]
                self.settle(state, outcome, "; ".join(texts))

    # -- blocks, looks ----------------------------------------------------------------------

    def _look_at(self, which: Sequence[BenchmarkState], looks: Sequence[int]) -> bool:
        """Take blocks of what is prepared until each benchmark has a verdict, or one is certainly
        SLOWER. Returns whether that decided the merge. which: only these take blocks, as long as
        one of them shows a slowdown after the first look; empty: all."""
        for look in looks:
            with self.timed("time"):
                self._up_to(look, which)
            with self.timed("confirm"):
                slower = self._confirm()
            if slower and not self.setting.all_verdicts:
                for state in self.unsettled():
                    self.settle(state, Outcome.NOT_DECIDED, _not_decided(state, slower[0]))
                return True
            if which and not any(map(_shows_slowdown, self._prepared(which))):
                return False
        return False

    def _prepared(self, which: Sequence[BenchmarkState]) -> list[BenchmarkState]:
        """What is undecided and was verified: ready for blocks."""
        names = {state.name for state in which}
        ready = (state for state in self.undecided() if state.proofs)
        return [state for state in ready if not names or state.name in names]

    def _up_to(self, look: int, which: Sequence[BenchmarkState]) -> None:
        """The blocks of what is undecided, up to a look, and the decisions by them."""
        if not (states := self._prepared(which)):
            return
        self._ask_device(self.setting.wait_until_idle)
        self.setting.say(f"{len(states)} undecided: blocks up to {look} of {LOOKS[-1]}")
        while behind := [state for state in self._prepared(which) if state.blocks < look]:
            fewest = min(state.blocks for state in behind)
            states_behind = [state for state in behind if state.blocks == fewest]
            self._wave(states_behind, sizes(look - fewest, self.setting.at_once)[0])
        for state in self._prepared(which):
            with self.errors_as_verdict(state):
                _look(state, last=look == LOOKS[-1])
                if all(state.settled(metric) for metric in state.series):
                    self._conclude(state)

    def _wave(self, states: Sequence[BenchmarkState], count: int, *, again: bool = False) -> int:
        """Take so many blocks of some benchmarks; returns how many, 0 where they are discarded.
        again: they confirm a slowdown. Raises Stopped."""
        before = [state.verdict for state in states]
        wave = Wave(self, count)
        wave.take(states)
        if wave.disturbed:
            self._discard(wave)
            return 0
        for state, verdict in zip(states, before, strict=True):
            if state.verdict is verdict:  # no error meanwhile
                with self.errors_as_verdict(state):
                    self._keep(state, wave, again)
        return count

    def _keep(self, state: BenchmarkState, wave: Wave, again: bool) -> None:
        state.figures += wave.layouts.get(state.name, [])
        for launch in wave.launches[state.name]:
            assert launch.block is not None
            state.first_calls.append(launch.first_calls)
            for metric, value in launch.block.statistics.items():
                series, work = self._series(state, metric), launch.block.all_work[metric]
                (series.again if again else series.statistics).append(value)
                (series.again_work if again else series.all_work).append(work)

    def _discard(self, wave: Wave) -> None:
        """Count a disturbed wave. After some of them nothing can be measured here; or, on a machine
        that is otherwise idle, the candidate's clock is wrong."""
        self.disturbed, self.discarded = self.disturbed + 1, self.discarded + wave.count
        self.setting.say(f"blocks are discarded ({wave.count}): {wave.disturbed}")
        if self.disturbed <= MAX_DISCARDED:
            return
        assert wave.disturbed is not None
        if wave.accused is None or wave.base_accused or self.setting.watch.loaded():
            raise Stopped(Verdict("device", Outcome.BUSY, wave.disturbed))
        self.settle(wave.accused, Outcome.MISSING, f"{wave.disturbed}: its clock is wrong")
        self.disturbed = 0

    def _series(self, state: BenchmarkState, metric: str) -> Series:
        """Of a metric of a benchmark, begun where it is not there yet."""
        if metric not in state.series:
            amount = self.setting.accepted.amount(state.name, metric)
            margin = margin_of(metric, self.setting.device)
            tolerance = state.benchmark.slowdowns[metric]
            tests = sum(
                len(each_state.benchmark.slowdowns) for each_state in self.compared.values()
            )
            rule = Rule(tests=tests, margin=margin + amount, tolerance=tolerance + amount)
            history = self.setting.noise.spread(state.name, metric, self.versions)
            state.series[metric] = Series(rule, history, amount)
        return state.series[metric]

    def _conclude(self, state: BenchmarkState) -> None:
        if not any(figure.metric == _FIRST_CALL for figure in state.figures):
            state.figures.append(_first_call(state, self.allowed(state)(_COMPILE)[0]))
        outcomes = [figure.outcome for figure in state.figures]
        outcome = worst(outcomes)
        figures = [
            f for f in state.figures if f.metric in state.series or f.outcome != Outcome.SAME
        ]
        self.settle(state, outcome, "; ".join(figure.text for figure in figures))

    def _confirm(self) -> list[BenchmarkState]:
        """Measure SLOWER times again in fresh processes; returns what is SLOWER then."""
        suspects = [*filter(unconfirmed, self.compared.values())]
        if suspects:
            most = f"at most {CONFIRM_BLOCKS} fresh blocks"
            self.setting.say(f"{len(suspects)} SLOWER: confirmed in {most}")
        while waiting := [*filter(unconfirmed, suspects)]:
            fewest = min(state.again for state in waiting)
            states_behind = [state for state in waiting if state.again == fewest]
            needed = min(_needs_again(state) for state in states_behind)
            self._wave(states_behind, sizes(needed, self.setting.at_once)[0], again=True)
        for state in suspects:
            if has_outcome(state, Outcome.SLOWER):  # an error meanwhile is its verdict
                state.figures = [_confirmed(state, figure) for figure in state.figures]
                self._conclude(state)
        return [state for state in self.compared.values() if has_outcome(state, Outcome.SLOWER)]

    # -- audited, attributed ----------------------------------------------------------------

    def _audit(self) -> None:
        """Time some IDENTICAL benchmarks all the same: what the change can reach is no proof. Only
        a confirmed SLOWER counts."""
        alike = [
            state
            for state in self.compared.values()
            if state.verdict == Verdict(state.name, Outcome.IDENTICAL, _ALIKE)
        ]
        audited = random.sample(alike, min(self.setting.audit, len(alike)))
        for state in audited:
            state.verdict = None
        if audited:
            with self.timed("audit"), self.pairs() as (pair,):
                self._prepare(pair, audited, audit=True)
            self._look_at([], AUDIT_LOOKS)
        for state in audited:
            if state.verdict is None or state.verdict.outcome in _NO_SLOWDOWN:
                verified = state.verdict is not None and bool(state.benchmark.untimed)
                said = "its results are verified" if verified else _so_far(state)
                state.figures = []
                self.settle(state, Outcome.IDENTICAL, f"{_ALIKE}; audited: {said}")

    def _attribute(self) -> None:
        """Find out which kernels of the SLOWER benchmarks changed."""
        slower = [state for state in self.compared.values() if has_outcome(state, Outcome.SLOWER)]
        if not slower:
            return
        try:
            with self.pairs() as (pair,):
                for state in slower:
                    try:
                        pair = self.working(pair)
                        pair.begin(state.benchmark)
                        profiles = [
                            pair.ask(side, "profiles", state.name, PROFILES)
                            for side in (BASE, CANDIDATE)
                        ]
                        state.moved = moved(*profiles, timed=_slower_on_the_device(state))
                        pair.end(state.benchmark)
                    except SideError as error:
                        if all_ended():
                            raise
                        state.moved = [f"not attributed: {_words(error)}"]
                    except ValueError as error:
                        state.moved = [f"not attributed: {error}"]
        except Stopped as stop:  # no pair, so none was attributed; no verdict changes
            for state in slower:
                state.moved = [f"not attributed: {stop.verdict.text}"]
        for state in slower:
            assert state.verdict is not None
            self.settle(state, Outcome.SLOWER, "\n    ".join([state.verdict.text, *state.moved]))


_COMPILE, _FIRST_CALL = "compile_seconds", "first_call_seconds"
_NO_SLOWDOWN = (Outcome.SAME, Outcome.FASTER, Outcome.INCONCLUSIVE)


def has_outcome(state: BenchmarkState, outcome: Outcome) -> bool:
    return state.verdict is not None and state.verdict.outcome is outcome


def unconfirmed(state: BenchmarkState) -> bool:
    """Whether times of a benchmark are SLOWER, and were not confirmed in fresh blocks."""
    return has_outcome(state, Outcome.SLOWER) and _needs_again(state) > 0


def _needs_again(state: BenchmarkState) -> int:
    """How many fresh blocks its SLOWER times still need."""
    slower = {f.metric.removeprefix(ALL_WORK) for f in state.figures if f.outcome is Outcome.SLOWER}
    return max((s.needs_again for m, s in state.series.items() if m in slower), default=0)


def _confirmed(state: BenchmarkState, figure: Figure) -> Figure:
    series = state.series.get(figure.metric.removeprefix(ALL_WORK))
    if figure.outcome is not Outcome.SLOWER or series is None or "confirmed" in figure.text:
        return figure
    return series.confirm(figure)


def _look(state: BenchmarkState, *, last: bool) -> None:
    """Decide the metrics that can be decided. Once one is SLOWER, the others take no more blocks:
    the benchmark is decided."""
    calls = {
        metric: (series, series.look(), series.work_figure(metric))
        for metric, series in state.series.items()
        if state.settled(metric) is None
    }
    last |= any(call is Call.SLOWER or work for _, call, work in calls.values())
    for metric, (series, call, work) in calls.items():
        state.figures += [work] if work else []
        waits = call is Call.MORE or (series.suspect and call is not Call.SLOWER)
        if last or not waits:
            state.figures.append(series.figure(metric, call))


def _shows_slowdown(state: BenchmarkState) -> bool:
    return any(
        mean(series.statistics) > series.rule.tolerance / 2 or series.suspect
        for metric, series in state.series.items()
        if state.settled(metric) is None
    )


def _first_call(state: BenchmarkState, accepted: float) -> Figure:
    """Of the seconds of the first calls in the fresh processes of blocks, whose code is compiled:
    SLOWER beyond a ratio plus seconds."""
    before, after = (
        median(seconds[side] for seconds in state.first_calls) for side in (BASE, CANDIDATE)
    )
    if not (is_number(before) and is_number(after) and before > 0):
        text = f"{_FIRST_CALL} was {before}, is {after}: invalid times"
        return Figure(_FIRST_CALL, Outcome.MISSING, text, before, after)
    limit = before * COMPILE_RATIO * (1 + accepted) + FIRST_CALL_SECONDS
    text = f"{_FIRST_CALL} {before:.2f} -> {after:.2f}"
    outcome = Outcome.SAME
    if after > limit:
        outcome, text = Outcome.SLOWER, f"{text}, allowed {limit:.2f}"
    return Figure(_FIRST_CALL, outcome, text, before, after, after / before)


def _not_decided(state: BenchmarkState, slower: BenchmarkState) -> str:
    return f"{slower.name} is SLOWER, which decides the merge; {_so_far(state)}"


def _so_far(state: BenchmarkState) -> str:
    if not state.blocks:
        return "it was not measured"
    means = (f"{m} {math.expm1(mean(s.statistics)):+.2%}" for m, s in state.series.items())
    text = f"so far {', '.join(means)} in {state.blocks} blocks"
    return f"{text}, which was not confirmed" if unconfirmed(state) else text


def _slower_on_the_device(state: BenchmarkState) -> bool:
    return any(f.metric == DEVICE and f.outcome is Outcome.SLOWER for f in state.figures)


def _words(error: SideError) -> str:
    last = error.details.strip().splitlines()[-1:]
    more = last and not last[0].endswith(str(error).rpartition("Error: ")[2])
    return f"{error} ({last[0]})" if more else str(error)
