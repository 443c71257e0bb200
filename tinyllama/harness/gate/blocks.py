"""The blocks of a comparison, and the decisions by them.

A wave is several blocks at once: as many fresh pairs as may work at the same time each give one
block of every benchmark that is undecided. Each makes another benchmark ready; then, with nothing
else at work, one after the other is timed. So a look costs one start of processes, not four.

Once a slowdown is certain and confirmed, the merge is decided. What is undecided then is NOT
DECIDED, unless all verdicts are asked for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, LOOKS, Call
from tinyllama.harness.gate.exact import layout_figures
from tinyllama.harness.gate.figures import Series
from tinyllama.harness.gate.listing import Stopped
from tinyllama.harness.gate.pair import BASE, CANDIDATE, WARM_UP, Block, Pair
from tinyllama.harness.gate.run import Run, has_outcome
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.records.verdict import Figure, Outcome, Verdict, worst

LOOKED = 10.0  # seconds between looks for other work on the device
MAX_DISCARDED = 2  # waves on a disturbed device; one more, and the verdict is BUSY


class Timed(NamedTuple):
    """What a block gives a benchmark: its turns; by side a call's seconds; figures."""

    block: Block
    paces: dict[str, float]
    layouts: list[Figure]


Blocks = list[dict[str, Timed]]  # by benchmark, of each pair


def decide(run: Run, *, nearest: bool = False) -> bool:
    """Take blocks of what is prepared until each benchmark has a verdict, or one is certainly
    SLOWER. Returns whether that decided the merge. nearest: other benchmarks are not prepared yet,
    so blocks after the first look are taken only while one of these shows a slowdown."""
    for look in LOOKS:
        with run.timed("time"):
            _up_to(run, look)
        with run.timed("confirm"):
            slower = _confirm(run)
        if slower and not run.setting.all_verdicts:
            for one in run.unsettled():
                run.settle(one, Outcome.NOT_DECIDED, _not_decided(one, slower[0]))
            return True
        if nearest and not any(map(_shows_slowdown, _prepared(run))):
            return False
    return False


def _shows_slowdown(one: BenchmarkState) -> bool:
    return any(
        statistics.mean(series.statistics) > series.rule.tolerance / 2 or series.suspect
        for metric, series in one.series.items()
        if one.settled(metric) is None
    )


def _up_to(run: Run, look: int) -> None:
    """The blocks of what is undecided, up to a look, and the decisions by them."""
    if not (open_ := _prepared(run)):
        return
    run.setting.say(f"{len(open_)} undecided: blocks up to {look} of {LOOKS[-1]}")
    while behind := [one for one in _prepared(run) if one.blocks < look]:
        fewest = min(one.blocks for one in behind)
        those = [one for one in behind if one.blocks == fewest]
        wave(run, those, look - fewest, lambda series: series.statistics)
    for one in _prepared(run):
        with run.errors_as_verdict(one):
            _look(one, last=look == LOOKS[-1])
            if all(one.settled(metric) for metric in one.series):
                _conclude(run, one)


def _prepared(run: Run) -> list[BenchmarkState]:
    """What is undecided and was verified: ready for blocks."""
    return [one for one in run.undecided() if one.proofs]


def _look(one: BenchmarkState, *, last: bool) -> None:
    """Decide the metrics that can be decided. Once one is SLOWER, the others take no more blocks:
    the benchmark is decided."""
    calls = {
        metric: (series, series.look(), series.slow_turns(metric))
        for metric, series in one.series.items()
        if one.settled(metric) is None
    }
    last |= any(call is Call.SLOWER or slow for _, call, slow in calls.values())
    for metric, (series, call, slow) in calls.items():
        one.figures += [slow] if slow else []
        waits = call is Call.MORE or (series.suspect and call is not Call.SLOWER)
        if last or not waits:
            one.figures.append(series.figure(metric, call))


def _conclude(run: Run, one: BenchmarkState) -> None:
    found = [figure.outcome for figure in one.figures]
    # An inconclusive figure does not hide another that is certainly slower.
    slower = Outcome.SLOWER in found and worst(found) is Outcome.INCONCLUSIVE
    outcome = Outcome.SLOWER if slower else worst(found)
    shown = [f for f in one.figures if f.metric in one.series or f.outcome is not Outcome.SAME]
    run.settle(one, outcome, "; ".join(figure.text for figure in shown))


def _not_decided(one: BenchmarkState, slower: BenchmarkState) -> str:
    so_far = [series.figure(metric, series.look()).text for metric, series in one.series.items()]
    known = f"so far {'; '.join(so_far)}" if so_far else "it was not measured"
    return f"{slower.name} is SLOWER, which decides the merge; {known}"


# -- blocks ---------------------------------------------------------------------------------------


def wave(
    run: Run, which: Sequence[BenchmarkState], count: int, of: Callable[[Series], list[float]]
) -> int:
    """At most ``count`` blocks of some benchmarks, whose statistics go where ``of`` says; returns
    how many were taken, 0 where they are discarded. Raises Stopped."""
    before = [one.verdict for one in which]
    waves = math.ceil(count / run.setting.at_once)  # of about the same size
    blocks, disturbed = _taken(run, which, math.ceil(count / waves))
    if disturbed:
        run.disturbed, run.discarded = run.disturbed + 1, run.discarded + len(blocks)
        run.setting.say(f"blocks are discarded ({len(blocks)}): {disturbed}")
        if run.disturbed > MAX_DISCARDED:
            raise Stopped(Verdict("device", Outcome.BUSY, disturbed))
        return 0
    for one, verdict in zip(which, before, strict=True):
        if one.verdict is not verdict:
            continue  # an error meanwhile
        with run.errors_as_verdict(one):
            for block in blocks:
                _keep(run, one, block[one.name], of)
    return len(blocks)


def _keep(run: Run, one: BenchmarkState, timed: Timed, of: Callable[[Series], list[float]]) -> None:
    one.paces = timed.paces
    one.figures += timed.layouts
    for metric, value in timed.block.statistics.items():
        series = run.series(one, metric)
        of(series).append(value)
        if of(series) is series.statistics:
            series.excesses.append(timed.block.excesses[metric])


def _taken(run: Run, which: Sequence[BenchmarkState], count: int) -> tuple[Blocks, str | None]:
    """So many blocks, and what disturbed the device meanwhile."""
    blocks: Blocks = [{} for _ in range(count)]
    before = {one.name: one.verdict for one in which}
    with run.pairs(count) as pairs, ThreadPoolExecutor(count) as pool:
        for pair in pairs:
            pair.processor = run.setting.processor
            pair.leading = (BASE, CANDIDATE)[run.launches % 2]
            run.launches += 1
        looked = time.monotonic()
        for step in range(len(which)):
            # Each is at another place of the list, so that neighbours share the memory.
            places = [(step + number * len(which) // count) % len(which) for number in range(count)]
            some = [which[place] for place in places]
            warm_up = WARM_UP if step else max(WARM_UP, run.effort.first)
            ready = list(pool.map(partial(_ready, run, warm_up, before), pairs, some))
            for pair, one, is_ready, block in zip(pairs, some, ready, blocks, strict=True):
                if is_ready and one.verdict is before[one.name]:
                    first = not one.series and not any(one.name in each for each in blocks)
                    with run.errors_as_verdict(one), one.takes("time"):
                        block[one.name] = _timed_once(run, pair, one, blocks, first=first)
            if step + 1 < len(which) and time.monotonic() - looked < LOOKED:
                continue
            looked = time.monotonic()
            pids = [pid for pair in pairs for pid in pair.pids()]
            if disturbed := run.setting.watch.during(pids):
                return blocks, disturbed
    return blocks, None


def _ready(
    run: Run,
    warm_up: float,
    before: dict[str, Verdict | None],
    pair: Pair,
    one: BenchmarkState,
) -> bool:
    """Whether a benchmark is ready to be timed; an error is its verdict."""
    if one.verdict is not before[one.name]:
        return False
    ready = False
    with run.errors_as_verdict(one), one.takes("make ready"):
        run.working(pair).make_ready(one.benchmark, one.proofs, warm_up)
        ready = True
    return ready


def _timed_once(run: Run, pair: Pair, one: BenchmarkState, blocks: Blocks, *, first: bool) -> Timed:
    """The statistics of a benchmark that is ready. In its first block also the seconds of a
    call by this process's clock, and the times on other layouts."""
    earlier = next((each[one.name] for each in blocks if one.name in each), None)
    paces, layouts = one.paces if earlier is None else earlier.paces, []
    if first:
        if not one.benchmark.factory:
            paces = {side: pair.pace(side, one.benchmark) for side in (BASE, CANDIDATE)}
        accepted = run.allowed(one)("layouts")[0]
        found = pair.layouts(one.benchmark)
        layouts = layout_figures(found, one.benchmark.layouts, accepted)
    pairs = run.effort.of(one.benchmark)
    block = pair.block(one.benchmark, pairs, paces, alike=_same_bits(one))
    return Timed(block, paces, layouts)


def _same_bits(one: BenchmarkState) -> bool:
    """Whether both sides gave the same bits when they were verified."""
    if one.benchmark.factory:
        return False
    each = (
        [{name: proof.digest for name, proof in proofs.items()} for proofs in one.proofs[side]]
        for side in (BASE, CANDIDATE)
    )
    base, candidate = each
    return base == candidate


# -- what is SLOWER -------------------------------------------------------------------------------


def _confirm(run: Run) -> list[BenchmarkState]:
    """Measure SLOWER times again in fresh processes; returns what is SLOWER then."""
    suspects = [
        one
        for one in run.found.values()
        if has_outcome(one, Outcome.SLOWER)
        and one.again < CONFIRM_BLOCKS
        and any(f.outcome is Outcome.SLOWER and f.metric in one.series for f in one.figures)
    ]
    if suspects:
        text = f"{len(suspects)} SLOWER: confirmed in {CONFIRM_BLOCKS} fresh blocks"
        run.setting.say(text)
    while waiting := [
        one for one in suspects if has_outcome(one, Outcome.SLOWER) and one.again < CONFIRM_BLOCKS
    ]:
        wave(run, waiting, CONFIRM_BLOCKS - waiting[0].again, lambda series: series.again)
    for one in suspects:
        if has_outcome(one, Outcome.SLOWER):  # an error meanwhile is its verdict
            one.figures = [_confirmed(one, figure) for figure in one.figures]
            _conclude(run, one)
    return [one for one in run.found.values() if has_outcome(one, Outcome.SLOWER)]


def _confirmed(one: BenchmarkState, figure: Figure) -> Figure:
    if figure.outcome is not Outcome.SLOWER or figure.metric not in one.series:
        return figure
    return one.series[figure.metric].confirm(figure)
