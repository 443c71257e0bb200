"""Which code each side runs, and which benchmarks it has, before anything is compiled."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
from tinyllama.harness.gate.setting import BenchmarkState, Setting
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.measure.op_contender import Timed
from tinyllama.harness.records.verdict import Outcome, Verdict


class Stopped(Exception):  # noqa: N818
    """The whole comparison has one verdict: nothing more can be measured."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


@dataclass
class Listed:
    """found: what both sides have; new: what the base's tree lacks; others: verdicts on what cannot
    be compared."""

    found: dict[str, BenchmarkState] = field(default_factory=dict)
    new: dict[str, BenchmarkState] = field(default_factory=dict)
    others: list[Verdict] = field(default_factory=list)


def unable(side: str) -> Outcome:
    return Outcome.NO_BASE if side == BASE else Outcome.WORKER_DIED


def check_identities(
    setting: Setting, trees: Mapping[str, Tree], who: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise Stopped where a side runs another tree, both run one, or their devices or versions
    differ."""
    for name, tree in trees.items():
        if who[name]["root"] != str(tree.root.resolve()):
            text = f"the {name} ran the code in {who[name]['root']}, not that in {tree.root}"
            raise Stopped(Verdict(name, unable(name), text))
    base, candidate = who[BASE], who[CANDIDATE]
    meant = setting.toolchains or setting.measure_all
    if base["root"] == candidate["root"] and not meant:
        text = f"both sides are {base['root']}: nothing is compared"
        raise Stopped(Verdict("trees", Outcome.MISSING, text))
    if base["device"] != candidate["device"]:
        text = f"{base['device']} and {candidate['device']}"
        raise Stopped(Verdict("device", Outcome.OTHER_DEVICE_OR_VERSION, text))
    alike = base["versions"] == candidate["versions"]
    if not setting.toolchains and not alike:
        text = f"{base['versions']} and {candidate['versions']}"
        raise Stopped(Verdict("versions", Outcome.OTHER_DEVICE_OR_VERSION, text))
    if setting.toolchains and alike and base["python"] == candidate["python"]:
        text = f"both sides are {base['python']}: nothing is compared"
        raise Stopped(Verdict("toolchain", Outcome.MISSING, text))


def matched(
    setting: Setting,
    base: Mapping[str, Benchmark],
    candidate: Mapping[str, Benchmark],
    left_out: Collection[str] = (),
) -> Listed:
    """The benchmarks of both sides by name. left_out: why providers of the candidate have none.

    Two interpreters run one tree: what only one of them has is not new. Raises Stopped where a base
    has no benchmark at all, and where an accepted entry names one that neither side has.
    """
    if not candidate and not base:
        text = "; ".join(("neither side has a benchmark", *left_out))
        raise Stopped(Verdict("benchmarks", Outcome.MISSING, text))
    if not base:
        raise Stopped(Verdict(BASE, Outcome.NO_BASE, "it has no benchmark: nothing is compared"))
    try:
        setting.accepted.check([*base, *candidate])
    except ValueError as error:
        raise Stopped(Verdict("accepted", Outcome.MISSING, str(error))) from error
    listed, only = Listed(), setting.only
    both = {**base, **candidate}
    if unknown := [op for op in setting.ops if not any(map(_is_of(op), both.values()))]:
        text = f"--op {unknown[0]}: neither side has a benchmark of it"
        raise Stopped(Verdict("benchmarks", Outcome.MISSING, text))
    if setting.ops:
        both = {n: one for n, one in both.items() if any(_is_of(op)(one) for op in setting.ops)}
    for name in [n for n in both if only is None or only(n)]:
        if name not in candidate and setting.accepted.is_removed(name):
            listed.others.append(Verdict(name, Outcome.SAME, "removed, and accepted as such"))
        elif name not in candidate:
            text = "the base has it, the candidate does not"
            listed.others.append(Verdict(name, Outcome.MISSING, text))
        elif name in base:
            listed.found[name] = BenchmarkState(_stricter(base[name], candidate[name]))
        elif setting.toolchains:
            text = "the base's interpreter does not have it"
            listed.others.append(Verdict(name, Outcome.NO_BASELINE, text))
        else:
            listed.new[name] = BenchmarkState(candidate[name])
    return listed


def _stricter(base: Benchmark, candidate: Benchmark) -> Benchmark:
    """The candidate's benchmark with the stricter tolerances and bars of both sides: a change can
    neither widen its own tolerance nor drop a metric."""
    return replace(
        candidate,
        slowdowns=_smaller(base.slowdowns, candidate.slowdowns),
        layouts=_smaller(base.layouts, candidate.layouts),
    )


def _smaller(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The smaller value of each name, whichever of the two has it."""
    return {name: min(v[name] for v in (one, other) if name in v) for name in {**other, **one}}


def _is_of(op: str) -> Callable[[Benchmark], bool]:
    """Whether a benchmark is one of that op; a step is of none."""
    return lambda one: isinstance(one.timed, Timed) and not one.factory and one.timed.op == op
