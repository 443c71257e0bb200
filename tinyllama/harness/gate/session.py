"""The whole comparison of a candidate with a base.

    listed      the benchmarks of both sides               -> MISSING
    affected    what the change can reach                  -> IDENTICAL, nothing is timed
    prepared    compiled from cold, inputs, counts         -> IDENTICAL kernels; exact figures; NEW
    verified    results held to float64 and to the base's  -> WRONG RESULT
    blocks      fresh pairs, a look after every fourth     -> SAME, FASTER, SLOWER, INCONCLUSIVE
    bars        time on a layout, of NEW ones alone, too   -> SLOWER
    confirmed   SLOWER is measured again in fresh pairs    -> SLOWER, or INCONCLUSIVE
    decided     once one is SLOWER                         -> the others are NOT DECIDED
    audited     some IDENTICAL ones are timed all the same -> IDENTICAL, or SLOWER
    attributed  profiles of both sides of what is SLOWER   -> which kernels changed

Whatever keeps a benchmark from being compared is its verdict: nothing is left out in silence.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from tinyllama.harness.gate.attribution import PROFILES, moved
from tinyllama.harness.gate.benchmarks import (
    BASE,
    CANDIDATE,
    Benchmark,
    Stopped,
    check_identities,
    matched,
)
from tinyllama.harness.gate.counters import (
    COLD_SECONDS,
    COUNTED_ON_GPU,
    count_figures,
    seconds_figure,
)
from tinyllama.harness.gate.declarations import changed_declarations
from tinyllama.harness.gate.device_guard import BusyError
from tinyllama.harness.gate.metric import Series, margin_of
from tinyllama.harness.gate.pair import Pair, SideError
from tinyllama.harness.gate.sequential_test import CONFIRM_BLOCKS, LOOKS, Rule
from tinyllama.harness.gate.setting import Affected, BenchmarkState, Setting
from tinyllama.harness.gate.waivers import COMPILE, IMPORT
from tinyllama.harness.gate.wave import Processes, Wave, wave_size
from tinyllama.harness.machine.worker import all_ended
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict, worst

MAX_DISCARDED = 2  # waves on a disturbed device; one more, and the verdict is BUSY
AUDIT_LOOKS = LOOKS[:2]
_ALIKE = "the same source, comments aside"
_RENAMED = "new, while others are MISSING: if it is one of them, renamed, restore its name"
_DECISIVE = (Outcome.MISSING, Outcome.SLOWER)  # before anything is prepared
_NO_SLOWDOWN = (Outcome.SAME, Outcome.FASTER, Outcome.INCONCLUSIVE)


class Session(Processes):
    """One comparison. `run` returns a verdict on each benchmark of either side.

    compared: the benchmarks of both sides; new: what the base lacks. disturbed: waves. discarded:
    blocks. changed: of what ops declare, where the base's holds.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.compared: dict[str, BenchmarkState] = {}
        self.new: dict[str, BenchmarkState] = {}
        self.affected: Mapping[str, Affected] = {}
        self.further_verdicts: list[Verdict] = []
        self.versions: dict[str, str] = {}
        self.disturbed = self.discarded = 0
        self.changed: list[str] = []
        self.times_all = setting.measure_all or setting.toolchains

    def run(self) -> list[Verdict]:
        try:
            self._decide()
            with self.timed("attribute"):
                self._attribute()
        except (Stopped, BusyError) as stop:
            busy = Verdict("device", Outcome.BUSY, str(stop))
            verdict = stop.verdict if isinstance(stop, Stopped) else busy
            self.further_verdicts.append(verdict)
            for state in self._open():
                state.settle(verdict.outcome, f"not measured: {verdict.text}")
        if any(verdict.outcome is Outcome.MISSING for verdict in self.verdicts()):
            for state in self.new.values():
                if state.has(Outcome.NEW) or state.has(Outcome.NOT_DECIDED):
                    state.settle(Outcome.NO_BASELINE, _RENAMED)
        return list(self.verdicts())

    def blocks(self, count: int) -> Iterator[dict[str, dict[str, float]]]:
        """Block after block, up to a count: the statistics of the benchmarks that can be timed.

        Raises Stopped where none can be, and BusyError. Those that failed have their verdicts in
        `compared`.
        """
        with self.timed("prepare"), self.pairs() as (pair,):
            self._list(pair)
            self._prepare(pair, self.undecided())
        while count > 0 and (states := self.undecided()):
            with self.timed("time"):
                taken = self._wave(states, min(self.setting.at_once, count))
            count -= taken
            for place in range(-taken, 0) if self.undecided() else ():
                yield {
                    state.name: {m: series.statistics[place] for m, series in state.series.items()}
                    for state in self.undecided()
                }

    def _decide(self) -> None:
        """Time the ops whose own files differ first: a merge that is SLOWER is mostly decided by
        them."""
        with self.timed("prepare"), self.pairs() as (pair,):
            self._list(pair)
            for state in self.compared.values():
                if state.name not in self.affected and not self.times_all:
                    state.settle(Outcome.IDENTICAL, _ALIKE)
            decisive = [v for v in self.further_verdicts if v.outcome in _DECISIVE]
            why = f"{decisive[0].name} is {decisive[0].outcome.title}" if decisive else ""
            if why and self._leave_undecided(why):
                return
            nearest = self._nearest()
            if self._prepare_decides(pair, nearest):
                return
        if nearest and self._look_at(nearest, LOOKS):
            return
        if nearest and self._unsettled():
            with self.timed("prepare"), self.pairs() as (pair,):
                if self._prepare_decides(pair, []):
                    return
        if not self._look_at([], LOOKS):
            with self.timed("time"):
                self._hold_new_to_layout_bars()
            if self.setting.audit:
                self._audit()

    def _nearest(self) -> list[BenchmarkState]:
        """The benchmarks that differ in a file of their own op, if they are at most half of those
        that differ. Once one of them is SLOWER, the merge is decided and the others need no
        preparation."""
        differ = self.undecided()
        edited = [s for s in differ if s.name in self.affected and self.affected[s.name].op_differs]
        return [] if self.setting.all_verdicts or 2 * len(edited) > len(differ) else edited

    def _prepare_decides(self, pair: Pair, nearest: Sequence[BenchmarkState]) -> bool:
        """Prepare the nearest benchmarks; where there are none, all, and what is new. Returns
        whether a result is wrong, so that no time can make the merge green."""
        self._prepare(pair, nearest or self._unsettled())
        states = (*self.compared.values(), *self.new.values())
        wrong = [state.name for state in states if state.has(Outcome.WRONG_RESULT)]
        return bool(wrong) and self._leave_undecided(f"the results of {wrong[0]} are wrong")

    # -- verdicts ---------------------------------------------------------------------------

    def undecided(self) -> list[BenchmarkState]:
        return [state for state in self.compared.values() if state.verdict is None]

    def _unsettled(self) -> list[BenchmarkState]:
        """The undecided ones, and those that are new and not verified yet."""
        return [*self.undecided(), *(s for s in self.new.values() if s.verdict is None)]

    def _open(self) -> list[BenchmarkState]:
        """The unsettled ones, and those that are SLOWER and were not confirmed."""
        return [*self._unsettled(), *(s for s in self.compared.values() if s.unconfirmed)]

    def verdicts(self) -> Iterator[Verdict]:
        yield from self.further_verdicts
        for state in (*self.compared.values(), *self.new.values()):
            yield state.verdict or Verdict(state.name, Outcome.MISSING, "no verdict was reached")

    def interrupted(self, why: str) -> list[Verdict]:
        """The verdicts of a comparison that did not end: what is open is NOT DECIDED."""
        for state in self._open():
            state.settle(Outcome.NOT_DECIDED, f"{why} ended the gate; {state.so_far()}")
        return list(self.verdicts())

    def _leave_undecided(self, why: str) -> bool:
        """Leave the other benchmarks NOT DECIDED, and return whether that was done: with
        ``all_verdicts`` each is decided."""
        for state in self._unsettled() if not self.setting.all_verdicts else ():
            text = f"{why}, which decides the merge; {state.so_far()}"
            state.settle(Outcome.NOT_DECIDED, text)
        return not self.setting.all_verdicts

    def _accepted(self, state: BenchmarkState, metric: str) -> float:
        return self.setting.accepted.amount(state.name, metric)

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

    # -- listed -----------------------------------------------------------------------------

    def _list(self, pair: Pair) -> None:
        """The benchmarks of both sides. Raises Stopped where they cannot be compared."""
        setting = self.setting
        who = pair.ask_both("identity")
        self.versions = who[CANDIDATE]["versions"]
        check_identities(
            {name: tree.root for name, tree in pair.trees.items()},
            who,
            toolchains=setting.toolchains,
            one_tree=self.times_all,
        )
        has = pair.ask_both("benchmarks")
        base, candidate = (
            {benchmark.name: benchmark for benchmark in has[side]} for side in (BASE, CANDIDATE)
        )
        listed = matched(
            base, candidate, setting.accepted, ops=setting.ops, toolchains=setting.toolchains
        )
        if not self.times_all:
            self.affected = setting.affected([*listed.common.values(), *listed.new.values()])
        edited = {name for name, affected in self.affected.items() if affected.op_differs}
        compared = {n: b for n, b in listed.common.items() if not b.further or n in edited}
        self.compared = {name: BenchmarkState(b) for name, b in compared.items()}
        self.new = {name: BenchmarkState(b) for name, b in listed.new.items()}
        self.further_verdicts += listed.verdicts
        if not setting.toolchains:
            declared = pair.ask_both("declarations")
            self.changed += changed_declarations(declared[BASE], declared[CANDIDATE])
        self._check_import({side: who[side]["import_seconds"] for side in who})

    def _check_import(self, seconds: dict[str, float]) -> None:
        """Hold the import of all ops in a fresh process to a bar. It is measured once more before
        it is SLOWER."""
        accepted = self.setting.accepted.amount(IMPORT, COMPILE)
        figure = seconds_figure("the import of the ops", seconds, accepted, COLD_SECONDS)
        if figure.outcome is Outcome.SLOWER:
            with self.pairs() as (pair,):
                again = pair.ask_both("identity")
            seconds = {side: min(seconds[side], again[side]["import_seconds"]) for side in seconds}
            figure = seconds_figure(figure.metric, seconds, accepted, COLD_SECONDS)
        if figure.outcome is not Outcome.SAME:
            self.further_verdicts.append(Verdict(IMPORT, figure.outcome, figure.text))

    # -- prepared, verified -----------------------------------------------------------------

    def _prepare(
        self, pair: Pair, states: Sequence[BenchmarkState], *, audit: bool = False
    ) -> None:
        """Compile, count and verify what is undecided of these, several at the same time."""
        waiting = [state for state in states if state.verdict is None and not state.proofs]
        if not waiting:
            return
        # A GPU is held while anything is compiled on it, a CPU only while something is timed.
        if self.setting.device.type != "cpu":
            self.setting.guard.hold()
        again: list[BenchmarkState] = []
        with ExitStack() as stack:
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
                    with pair.ending(state.benchmark):  # the next one has the memory
                        self._prepare_benchmark(pair, state, audit)
                except SideError as error:
                    if again is None or not error.memory:
                        raise
                    state.figures, state.proofs = [], {}
                    again.append(state)

    def _prepare_benchmark(self, pair: Pair, state: BenchmarkState, audit: bool) -> None:
        benchmark, name = state.benchmark, state.name
        seconds = pair.begin(benchmark)
        if kernel := pair.interpreted(benchmark):
            why = f"it launches {kernel}, which is interpreted on a CPU"
            benchmark = replace(benchmark, untimed=why, slowdowns={}, layout_bar=0.0)
            state.benchmark = benchmark
            pair.begin(benchmark)
        if benchmark.new:
            pair.verify(benchmark)
            untimed = f", and not timed: {benchmark.untimed}" if benchmark.untimed else ""
            return state.settle(Outcome.NEW, f"its results are verified{untimed}")
        inputs = pair.ask_both("inputs", name)
        if inputs[BASE] != inputs[CANDIDATE]:
            text = (
                "its inputs are not those of the base: give what is another benchmark another name"
            )
            return state.settle(Outcome.NO_BASELINE, text)
        if benchmark.untimed:
            if self._verify(pair, state):
                text = f"its results are verified, and not timed: {benchmark.untimed}"
                state.settle(Outcome.SAME, text)
            return None
        counted = pair.ask_both("counted", name)
        compiled = pair.ask_both("compiled", name)
        metrics = COUNTED_ON_GPU if self.setting.device.type != "cpu" else ()
        counts = counted[BASE], counted[CANDIDATE]
        state.figures += count_figures(*counts, partial(self._accepted, state), metrics)
        state.figures.append(self._compile_figure(state, seconds))
        alike = all(figure.outcome is Outcome.SAME for figure in state.figures)
        affected = self.affected.get(name)
        kernels_alone = affected is not None and not affected.host
        # Where kernels are compiled, a benchmark without launches may have some that are not seen.
        seen = bool(compiled[BASE]) or self.setting.device.type == "cpu"
        if alike and kernels_alone and seen and compiled[BASE] == compiled[CANDIDATE] and not audit:
            launches = len(compiled[BASE])
            kernels = f"the same kernels in {launches} launches" if launches else "no kernel"
            text = f"the same host code, and {kernels}"
            return state.settle(Outcome.IDENTICAL, text)
        self._verify(pair, state)
        return None

    def _verify(self, pair: Pair, state: BenchmarkState) -> bool:
        """Whether the results of both sides are right, so that their times can be compared.

        A base whose own result is wrong on two draws of values has none that counts. Then the
        candidate is judged alone, by the base's reference, and is NEW where it is right: a fix can
        be merged, unless a count has already shown it to be SLOWER.
        """
        try:
            state.proofs = self._proofs(pair, state.benchmark)
        except SideError as error:
            slower = any(figure.outcome is Outcome.SLOWER for figure in state.figures)
            if slower or not self._base_is_wrong(pair, state.benchmark, error):
                raise
            self._proofs(pair, state.benchmark, base_result=False)
            text = f"the base's result is wrong; the candidate's is right ({error})"
            state.settle(Outcome.NEW, text)
        return state.verdict is None

    def _proofs(self, pair: Pair, benchmark: Benchmark, *, base_result: bool = True) -> Any:
        removed = bool(benchmark.untimed) and self.setting.accepted.is_removed(benchmark.name)
        return pair.verify(benchmark, base_result=base_result, removed=removed)

    def _base_is_wrong(self, pair: Pair, benchmark: Benchmark, error: SideError) -> bool:
        """Whether an error says that the base's result is wrong, and so does another draw: one that
        is near what rounding allows may be wrong on a draw by chance."""
        if not error.wrong or error.side != BASE:
            return False
        try:
            self._proofs(pair, benchmark)
        except SideError as again:
            return again.wrong and again.side == BASE
        return False

    def _compile_figure(self, state: BenchmarkState, seconds: Mapping[str, float]) -> Figure:
        return seconds_figure(COMPILE, seconds, self._accepted(state, COMPILE), COLD_SECONDS)

    def _compile_again(self, states: Sequence[BenchmarkState]) -> None:
        """Measure compile times that are SLOWER again, with nothing else at work."""
        slower = [s for s in states if (f := s.settled(COMPILE)) and f.outcome is Outcome.SLOWER]
        if not slower:
            return
        with self.pairs() as (pair,):
            for number, state in enumerate(slower):
                with self.errors_as_verdict(state):
                    pair = self.working(pair)
                    for tree in self.trees:
                        folder = tree.caches.with_name(f"{tree.caches.name}-again-{number}")
                        pair.ask(tree.name, "use_caches", str(folder))
                    with pair.ending(state.benchmark):
                        again = self._compile_figure(state, pair.begin(state.benchmark))
                    state.figures = [again if f.metric == COMPILE else f for f in state.figures]

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
            if slower and self._leave_undecided(f"{slower[0].name} is SLOWER"):
                return True
            if which and not any(state.shows_slowdown for state in self._prepared(which)):
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
        self.setting.guard.wait_until_idle()
        self.setting.say(f"{len(states)} undecided: blocks up to {look} of {LOOKS[-1]}")
        while behind := [state for state in self._prepared(which) if state.blocks < look]:
            fewest = min(state.blocks for state in behind)
            states_behind = [state for state in behind if state.blocks == fewest]
            self._wave(states_behind, wave_size(look - fewest, self.setting.at_once))
        for state in self._prepared(which):
            with self.errors_as_verdict(state):
                state.look(last=look == LOOKS[-1])
                if all(state.settled(metric) for metric in state.series):
                    self._conclude(state)

    def _conclude(self, state: BenchmarkState) -> None:
        self._hold_to_layout_bar(state)
        state.conclude(self._accepted(state, COMPILE))

    def _hold_to_layout_bar(self, state: BenchmarkState) -> None:
        if contiguous := self._contiguous(state):
            state.hold_to_layout_bar(contiguous, self._accepted(state, "layouts"))

    def _contiguous(self, state: BenchmarkState) -> BenchmarkState | None:
        """The same benchmark on contiguous inputs, where there is a bar on its layout."""
        if not state.benchmark.layout_bar:
            return None
        timed = replace(state.benchmark.timed, layout="contiguous")
        states = (*self.compared.values(), *self.new.values())
        return next((other for other in states if other.benchmark.timed == timed), None)

    def _hold_new_to_layout_bars(self) -> None:
        """Time what is NEW, has a bar on its layout and was verified, and the same on contiguous
        inputs, by the candidate alone. Their times have no verdict."""
        bars = [(s, other) for s in self.new.values() if (other := self._contiguous(s))]
        pairs = [(s, other) for s, other in bars if not other.benchmark.untimed]
        behind = [s for both in pairs for s in both if s.benchmark.new and s.has(Outcome.NEW)]
        if behind:
            self.setting.guard.wait_until_idle()
            self.setting.say(f"{len(behind)} new: {LOOKS[0]} blocks for their bars on layouts")
        while behind:
            self._wave(behind, wave_size(LOOKS[0] - len(behind[0].seconds), self.setting.at_once))
            behind = [s for s in behind if s.has(Outcome.NEW) and len(s.seconds) < LOOKS[0]]
        for state, _ in pairs:
            if state.verdict is not None and state.has(Outcome.NEW):
                self._hold_to_layout_bar(state)
                outcome = worst([Outcome.NEW, *(figure.outcome for figure in state.figures)])
                texts = [state.verdict.text, *(figure.text for figure in state.figures)]
                state.settle(outcome, "; ".join(texts))

    def _wave(self, states: Sequence[BenchmarkState], count: int, *, again: bool = False) -> int:
        """Take so many blocks of some benchmarks; returns how many, 0 where they are discarded.
        again: they confirm a slowdown. Raises Stopped."""
        before = [state.verdict for state in states]
        wave = Wave(self, count)
        wave.take(states)
        if wave.disturbed:
            for state in states:
                state.paces = {}  # the judge's clock was disturbed, too
            self._discard(wave)
            return 0
        for state, verdict in zip(states, before, strict=True):
            if state.verdict is verdict:  # no error meanwhile
                with self.errors_as_verdict(state):
                    self._keep(state, wave, again)
        return count

    def _keep(self, state: BenchmarkState, wave: Wave, again: bool) -> None:
        for launch in wave.launches[state.name]:
            state.first_calls.append(launch.first_calls)
            if not again:
                state.seconds.append(launch.block.seconds)
            for metric, value in launch.block.statistics.items():
                series, work = self._series(state, metric), launch.block.all_work[metric]
                (series.again if again else series.statistics).append(value)
                (series.again_work if again else series.all_work).append(work)

    def _discard(self, wave: Wave) -> None:
        """Count a disturbed wave. After some of them nothing can be measured here."""
        self.disturbed, self.discarded = self.disturbed + 1, self.discarded + wave.count
        self.setting.say(f"blocks are discarded ({wave.count}): {wave.disturbed}")
        if self.disturbed > MAX_DISCARDED:
            raise Stopped(Verdict("device", Outcome.BUSY, str(wave.disturbed)))

    def _series(self, state: BenchmarkState, metric: str) -> Series:
        """Of a metric of a benchmark, begun where it is not there yet."""
        if metric not in state.series:
            amount = self._accepted(state, metric)
            margin = margin_of(metric, self.setting.device)
            tolerance = state.benchmark.slowdowns[metric]
            tests = sum(len(other.benchmark.slowdowns) for other in self.compared.values())
            rule = Rule(tests=tests, margin=margin + amount, tolerance=tolerance + amount)
            history = self.setting.noise.spread(state.name, metric, self.versions)
            state.series[metric] = Series(rule, history, amount)
        return state.series[metric]

    def _confirm(self) -> list[BenchmarkState]:
        """Measure SLOWER times again in fresh processes; returns what is SLOWER then."""
        suspects = [state for state in self.compared.values() if state.unconfirmed]
        if suspects:
            most = f"at most {CONFIRM_BLOCKS} fresh blocks"
            self.setting.say(f"{len(suspects)} SLOWER: confirmed in {most}")
        while waiting := [state for state in suspects if state.unconfirmed]:
            fewest = min(state.again for state in waiting)
            states_behind = [state for state in waiting if state.again == fewest]
            needed = min(state.needs_again for state in states_behind)
            self._wave(states_behind, wave_size(needed, self.setting.at_once), again=True)
        for state in suspects:
            if state.has(Outcome.SLOWER):  # an error meanwhile is its verdict
                state.confirm()
                self._conclude(state)
        return [state for state in self.compared.values() if state.has(Outcome.SLOWER)]

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
                said = "its results are verified" if verified else state.so_far()
                state.figures = []
                state.settle(Outcome.IDENTICAL, f"{_ALIKE}; audited: {said}")

    def _attribute(self) -> None:
        """Find out which kernels of the SLOWER benchmarks changed. Whatever fails here changes no
        verdict."""
        slower = [state for state in self.compared.values() if state.has(Outcome.SLOWER)]
        if not slower:
            return
        try:
            with self.pairs() as (pair,):
                for state in slower:
                    state.moved = self._moved(self.working(pair), state)
        except Stopped as stop:
            for state in slower:
                why = f"{stop.verdict.name}: {stop.verdict.text}"
                state.moved = state.moved or [f"not attributed: {why}"]
        for state in slower:
            assert state.verdict is not None
            state.settle(Outcome.SLOWER, "\n    ".join([state.verdict.text, *state.moved]))

    def _moved(self, pair: Pair, state: BenchmarkState) -> list[str]:
        try:
            with pair.ending(state.benchmark):
                pair.begin(state.benchmark)
                profiles = [
                    pair.ask(side, "profiles", state.name, PROFILES) for side in (BASE, CANDIDATE)
                ]
            lines = moved(*profiles, timed=state.is_slower_on_device)
        except (SideError, ValueError) as error:
            if all_ended():
                raise
            return [f"not attributed: {error}"]
        return lines
