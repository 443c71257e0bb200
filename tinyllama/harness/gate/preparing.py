"""The stages before anything is timed: what both sides have, which of it is IDENTICAL, and of the
rest what is compiled, counted and held to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from tinyllama.harness.gate.accepted import FILE
from tinyllama.harness.gate.benchmarks import Benchmark, check_identities, matched
from tinyllama.harness.gate.exact import (
    COUNTED_ON_GPU,
    compile_figure,
    count_figures,
    layout_figures,
    new_figures,
)
from tinyllama.harness.gate.identity import Differs
from tinyllama.harness.gate.judged import Change, changed_declarations
from tinyllama.harness.gate.memory import ready_bytes
from tinyllama.harness.gate.pair import BASE, CANDIDATE, READY, Pair, SideError
from tinyllama.harness.gate.run import Run
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.sources import module_file
from tinyllama.harness.gate.verified import held_to_base
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.op_contender import Timed, WrongResultError
from tinyllama.harness.records.verdict import Outcome, Verdict, worst


def list_benchmarks(run: Run, pair: Pair) -> None:
    """The benchmarks of both sides. Raises Stopped where they cannot be compared."""
    with run.part("list benchmarks"):
        _list(run, pair)


def _list(run: Run, pair: Pair) -> None:
    who = pair.each("identity")
    run.versions = who[CANDIDATE]["versions"]
    check_identities(run.setting, pair.trees, who)
    run.left_out = pair.ask(CANDIDATE, "left_out")
    has = pair.each("benchmarks")
    base, candidate = ({one.name: one for one in has[side]} for side in (BASE, CANDIDATE))
    listed = matched(run.setting, base, candidate, run.left_out)
    both, new = (
        {n: BenchmarkState(b) for n, b in each.items()} for each in (listed.found, listed.new)
    )
    run.found = {name: state for name, state in both.items() if _is_compared(run, state)}
    run.new = {name: state for name, state in new.items() if not state.benchmark.further}
    run.others += listed.others
    if not run.setting.toolchains:
        declared = pair.each("declarations")
        run.changed += changed_declarations(declared[BASE], declared[CANDIDATE])
    if anew := [one for one in run.changed if one not in run.setting.accepted.changes]:
        run.others.append(Verdict("judge", Outcome.JUDGE_CHANGED, _accept(anew)))


def _is_compared(run: Run, one: BenchmarkState) -> bool:
    """Whether a benchmark is compared at all: a further case only where an own file differs."""
    blind = run.setting.measure_all or run.setting.toolchains
    return not one.benchmark.further or (not blind and _own_differs(run, one))


def nearest(run: Run) -> list[BenchmarkState]:
    """The benchmarks that differ in a file of their own op, if they are at most half of those that
    differ. They are timed first: once one of them is SLOWER, the merge is decided and the others
    need no preparation."""
    differ = [one for one in run.undecided() if not _alike(run, one, whole=True)]
    own = [one for one in differ if _own_differs(run, one)]
    every = run.setting.all_verdicts or run.setting.measure_all or run.setting.toolchains
    return [] if every or 2 * len(own) > len(differ) else own


def _own_differs(run: Run, one: BenchmarkState) -> bool:
    base, candidate = (run.setting.sources(tree, one.benchmark)[0] for tree in run.trees)
    own: list[str] = []
    for tree in run.trees:
        if path := module_file(tree.root, one.benchmark.module):
            name = path.relative_to(tree.root).as_posix()
            own.append(name.removesuffix("__init__.py"))
    differ = (name for name in {**base, **candidate} if base.get(name) != candidate.get(name))
    return any(name.startswith(tuple(own)) for name in differ)


def prepare(run: Run, pair: Pair, first: Sequence[BenchmarkState] = ()) -> None:
    """Compile, count and verify the benchmarks that differ; meanwhile others are observed. Measure
    those that are NEW. first: prepare only these, if there are any."""
    with _observing(run) as observed:
        differs = {one.name for one in run.undecided() if not _alike(run, one, whole=True)}
        open_ = list(first) or run.undecided()
        with run.part("compile and verify"):
            _prepare_all(run, pair, [one for one in open_ if _unready(one, differs)], observed)
        with run.part("wait for observers"):
            observed()
        for one in run.undecided():
            if one.name not in differs and one.name not in observed().whole:
                run.settle(one, Outcome.IDENTICAL, _ALIKE)
        rest = {one.name for one in run.undecided()} - differs
        _prepare_all(run, pair, [one for one in open_ if _unready(one, rest)], observed)
    if first:
        return
    for one in run.new.values():  # their times are read, with nothing else at work
        with run.errors_as_verdict(one):
            pair = run.working(pair)
            seconds, counted, layouts = pair.alone(one.benchmark, run.effort)
            accepted = run.allowed(one)("layouts")[0]
            bars = layout_figures(layouts, one.benchmark.layouts, accepted)
            one.figures = [*new_figures(seconds, counted), *bars]
            outcome = worst([Outcome.NEW, *(figure.outcome for figure in one.figures)])
            run.settle(one, outcome, "; ".join(figure.text for figure in one.figures))


def _unready(one: BenchmarkState, names: Collection[str]) -> bool:
    return one.name in names and not one.proofs


_ALIKE = "the same source, comments aside"


class Observed:
    """Why benchmarks are measured, once that was seen. Calling it waits."""

    def __init__(self, seen: Future[Differs] | Differs) -> None:
        self._seen = seen

    def __call__(self) -> Differs:
        return self._seen if isinstance(self._seen, Differs) else self._seen.result()


@contextmanager
def _observing(run: Run) -> Iterator[Observed]:
    """Why benchmarks are measured, seen while others are prepared. Nothing is timed before it is
    known."""
    setting = run.setting
    if run.differs is not None:
        yield Observed(run.differs)
        return
    if setting.toolchains or setting.measure_all:
        every = dict.fromkeys(run.found, "everything is timed")
        yield Observed(Differs(every, every))
        return
    undecided = run.undecided()
    asked = [one for one in undecided if _alike(run, one, whole=False)]
    if setting.differs is None or not asked:
        by_source = Differs(
            {one.name: "source" for one in undecided if not _alike(run, one, whole=True)},
            {one.name: "source" for one in undecided if not _alike(run, one, whole=False)},
        )
        yield Observed(by_source)
        return
    setting.doing(f"{run.stage}: what {len(asked)} benchmarks open")
    benchmarks = [one.benchmark for one in (*run.found.values(), *run.new.values())]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(setting.differs, run.trees, benchmarks)
        yield Observed(found)
        alike = [one.name for one in undecided if _alike(run, one, whole=True)]
        run.differs = found.result()
        whole = run.differs.whole
        run.unidentified = {name: whole[name] for name in alike if name in whole}
    run.untampered()


def _alike(run: Run, one: BenchmarkState, *, whole: bool) -> bool:
    """Whether both sides have the same source; not ``whole``: kernels' bodies aside."""
    part = 0 if whole else 1
    base, candidate = (run.setting.sources(t, one.benchmark)[part] for t in run.trees)
    return base == candidate


def _prepare_all(
    run: Run, pair: Pair, benchmarks: Sequence[BenchmarkState], observed: Observed
) -> None:
    groups = _groups(benchmarks, lambda one: len(run.setting.sources(run.trees[0], one)[0]))
    again: list[BenchmarkState] = []
    with _beside(run, pair, len(groups)) as pairs, ThreadPoolExecutor(len(pairs)) as pool:
        waiting = iter(groups)
        asked = [pool.submit(_prepare_some, run, each, waiting, observed, again) for each in pairs]
        wait(asked, return_when=FIRST_COMPLETED)  # processors and the device have less to do
        with run.setting.ahead():
            for done in asked:
                done.result()
    # What found no memory beside others is prepared again alone.
    _prepare_some(run, pair, iter([again]), observed, None)


def _groups(
    benchmarks: Iterable[BenchmarkState], files: Callable[[Benchmark], int]
) -> list[list[BenchmarkState]]:
    """What one pair prepares, one after the other: the cases and layouts of a provider, which share
    compiled code. First what takes longest: steps, then what has kernels of its own, and of these
    what imports most. files: of the source of a benchmark."""
    found: dict[Any, list[BenchmarkState]] = {}
    for one in benchmarks:
        timed = one.benchmark.timed
        shared = isinstance(timed, Timed) and not one.benchmark.factory
        found.setdefault((timed.op, timed.provider) if shared else one.name, []).append(one)

    def takes_less(group: list[BenchmarkState]) -> tuple[bool, bool, int, int]:
        each = [one.benchmark for one in group]
        kernels = any(one.layouts for one in each)
        return not any(one.factory for one in each), not kernels, -files(each[0]), -len(each)

    return sorted(found.values(), key=takes_less)


@contextmanager
def _beside(run: Run, pair: Pair, groups: int) -> Iterator[list[Pair]]:
    """The pair, and more of them that prepare benchmarks at the same time: one more than may give
    blocks at once, since all of those started ahead.

    Each compiles into a cache of its own, but for Triton's kernels: code that another pair compiled
    meanwhile, perhaps for one side only, would change the seconds of a first call. Blocks find all
    of it.
    """
    more = min(run.setting.at_once, groups - 1)
    if more < 1 or run.setting.at_once == 1:
        yield [pair]
        return
    with run.pairs(more) as others:
        for number, other in enumerate(others):
            other.compile_apart(str(number))
        yield [pair, *others]
        for other in others:
            other.merge_caches(run.trees)


def _prepare_some(
    run: Run,
    pair: Pair,
    waiting: Iterator[Sequence[BenchmarkState]],
    observed: Observed,
    again: list[BenchmarkState] | None,
) -> None:
    """again: takes what found no memory beside other pairs; None: no other works, so that is the
    verdict."""
    for one in (each for group in waiting for each in group):
        with (
            run.ready.held(2 * ready_bytes(one.benchmark)),
            run.errors_as_verdict(one),
            one.takes("prepare"),
        ):
            pair = run.working(pair)
            try:
                pair.each("warm_up_blas")  # a pair may be new
                seconds = pair.begin(one.benchmark)
                _prepare_one(run, pair, one, seconds, observed)
                pair.end(one.benchmark)  # the next one has the memory
            except SideError as error:
                if again is None or not error.memory:
                    raise
                one.figures, one.proofs = [], {}
                again.append(one)


def _prepare_one(
    run: Run, pair: Pair, one: BenchmarkState, seconds: Mapping[str, float], observed: Observed
) -> None:
    inputs = pair.each("inputs", one.name)
    if inputs[BASE] != inputs[CANDIDATE]:
        text = "its inputs are not those of the base: give what is another benchmark another name"
        return run.settle(one, Outcome.NO_BASELINE, text)
    counted = pair.each("counted", one.name)
    compiled = pair.each("compiled", one.name)
    allowed = run.allowed(one)
    wanted = COUNTED_ON_GPU if run.setting.device.type != "cpu" else ()
    one.figures += count_figures(counted[BASE], counted[CANDIDATE], allowed, wanted)
    one.figures.append(compile_figure(seconds, lambda metric: allowed(metric)[0]))
    alike = all(figure.outcome is Outcome.SAME for figure in one.figures)
    if alike and _same_code(one, compiled, observed):
        text = f"the same host code, and the same kernels in {len(compiled[BASE])} launches"
        return run.settle(one, Outcome.IDENTICAL, text)
    with run.exact.held(one.exact_bytes), one.takes("verify"):  # by one side at a time
        for side in (BASE, CANDIDATE):
            one.proofs[side] = pair.ask(side, "verify", one.name, timeout=READY)
            one.exact = max(one.exact, pair.ask(side, "most_bytes", one.name) or 0)
    if not one.benchmark.factory:
        one.proofs[CANDIDATE] = _held(one.proofs)
    if layouts := tuple(one.benchmark.layouts):
        pair.ask(CANDIDATE, "compile_layouts", one.name, layouts, timeout=READY)
    return None


def _same_code(
    one: BenchmarkState, compiled: Mapping[str, Sequence[str]], observed: Observed
) -> bool:
    same = compiled[BASE] == compiled[CANDIDATE] != []
    return same and one.name not in observed().host


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
