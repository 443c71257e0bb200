"""The decisions of a comparison by its blocks (`tinyllama.harness.gate.waves`).

Once a slowdown is certain and confirmed, the merge is decided. What is undecided then is NOT
DECIDED, unless all verdicts are asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tinyllama.harness.gate.decision import CONFIRM_BLOCKS, LOOKS, Call
from tinyllama.harness.gate.run import Run, has_outcome, unconfirmed
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.waves import wave
from tinyllama.harness.records.verdict import Figure, Outcome, worst


def decide(run: Run, nearest: Sequence[BenchmarkState] = ()) -> bool:
    """Take blocks of what is prepared until each benchmark has a verdict, or one is certainly
    SLOWER. Returns whether that decided the merge. nearest: only these
    take blocks, as long as one of them shows a slowdown after the first look."""
    for look in LOOKS:
        with run.timed("time"):
            _up_to(run, look, nearest)
        with run.timed("confirm"):
            slower = _confirm(run)
        if slower and not run.setting.all_verdicts:
            for one in run.unsettled():
                run.settle(one, Outcome.NOT_DECIDED, _not_decided(one, slower[0]))
            return True
        if nearest and not any(map(_shows_slowdown, _prepared(run, nearest))):
            return False
    return False


def _shows_slowdown(one: BenchmarkState) -> bool:
    return any(
        statistics.mean(series.statistics) > series.rule.tolerance / 2 or series.suspect
        for metric, series in one.series.items()
        if one.settled(metric) is None
    )


def _up_to(run: Run, look: int, of: Sequence[BenchmarkState]) -> None:
    """The blocks of what is undecided, up to a look, and the decisions by them."""
    if not (open_ := _prepared(run, of)):
        return
    run.setting.say(f"{len(open_)} undecided: blocks up to {look} of {LOOKS[-1]}")
    while behind := [one for one in _prepared(run, of) if one.blocks < look]:
        fewest = min(one.blocks for one in behind)
        those = [one for one in behind if one.blocks == fewest]
        wave(run, those, look - fewest, lambda series: series.statistics)
    for one in _prepared(run, of):
        with run.errors_as_verdict(one):
            _look(one, last=look == LOOKS[-1])
            if all(one.settled(metric) for metric in one.series):
                _conclude(run, one)


def _prepared(run: Run, of: Sequence[BenchmarkState]) -> list[BenchmarkState]:
    """What is undecided and was verified: ready for blocks. of: some benchmarks; empty: all."""
    names = {one.name for one in of}
    return [one for one in run.undecided() if one.proofs and (not names or one.name in names)]


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


# -- what is SLOWER -------------------------------------------------------------------------------


def _confirm(run: Run) -> list[BenchmarkState]:
    """Measure SLOWER times again in fresh processes; returns what is SLOWER then."""
    suspects = [*filter(unconfirmed, run.found.values())]
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
