"""Inputs that are not contiguous, in the gate: which calls are timed on them, and the op's bar."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE
from correctness_tests.support.gate_fakes import SECONDS, Script
from correctness_tests.support.tried import derived
from tinyllama.harness.declare.op import Op
from tinyllama.harness.gate.benchmarks import Benchmark, Registered, declared
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.worker import Side
from tinyllama.harness.measure.op_contender import ops_of
from tinyllama.harness.records.verdict import Outcome

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TREE, REGISTERED = Registered(PACKAGE), Registered(PACKAGE, FILES)  # with the toy op
PLAIN = "weigh_rows-manual-N16D64-fp32/forward+backward"
STRIDED = "weigh_rows-manual-N16D64-fp32-strided/forward+backward"
TRANSPOSED = STRIDED.replace("strided", "transposed")


@pytest.fixture
def weigh() -> Iterator[Op]:
    """The toy op with a provider that has a backward of its own."""
    op = ops_of(PACKAGE, FILES)["weigh_rows"]
    before, layouts = dict(op.providers), op.layouts

    def backward(grads: Any, kept: Any, saved: Any, needs: set[str]) -> Any:
        return {"x": grads[0] * kept["weight"], "weight": (grads[0] * kept["x"]).sum(0)}

    manual = derived(lambda x, weight: x * weight, backward)
    op.provider("manual", keep=("x", "weight"))(manual)
    yield op
    op.providers, op.layouts = before, layouts


def listed(device: torch.device = CPU) -> dict[str, Benchmark]:
    benchmarks = {benchmark.name: benchmark for benchmark in declared(device, REGISTERED)}
    return {name: benchmark for name, benchmark in benchmarks.items() if name.startswith("weigh")}


# -- which are timed --------------------------------------------------------------------------


@pytest.mark.usefixtures("weigh")
def test_a_provider_with_its_own_backward_is_timed_on_both_layouts() -> None:
    benchmarks = listed()
    plain = benchmarks[PLAIN]
    for name, layout, further in ((STRIDED, "strided", False), (TRANSPOSED, "transposed", True)):
        assert benchmarks[name].timed == replace(plain.timed, layout=layout)
        assert benchmarks[name].further is further
        assert benchmarks[name].slowdowns == plain.slowdowns
        assert benchmarks[name].layout_bar == 2.0
    assert {name for name in benchmarks if "-manual-" in name} == {PLAIN, STRIDED, TRANSPOSED}


def test_the_slowest_layout_is_the_first_that_the_op_names(weigh: Op) -> None:
    weigh.layouts = {"transposed": 3.0}
    assert not listed()[TRANSPOSED].further
    assert STRIDED not in listed()


# -- what a side gives ------------------------------------------------------------------------


@pytest.mark.usefixtures("weigh")
def test_a_side_times_calls_on_the_layout() -> None:
    side = Side("cpu", REGISTERED)
    for name in (PLAIN, STRIDED):
        side.begin(name, (DEVICE,))
        side.verify(name, 1)
        side.make_ready(name, None, warm_up=0.0)
        assert side.turn(name, 1)[DEVICE] > 0
    inputs = {name: side.subjects[name].args["x"] for name in (PLAIN, STRIDED)}
    assert {name: x.is_contiguous() for name, x in inputs.items()} == {PLAIN: True, STRIDED: False}
    assert side.inputs(PLAIN) == side.inputs(STRIDED), "the same values"
    side.turn(STRIDED, 2, 3)
    assert {*side.proofs(STRIDED)} == {"y", "grad x", "grad weight"}, "what a timed call gave"


# -- the op's bar ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "candidate", "bars", "accepted", "outcome"),
    [
        (1.6, 1.9, {}, 0.0, Outcome.SAME),
        (1.6, 3.2, {}, 0.0, Outcome.SLOWER),
        (1.6, 3.2, {}, 0.5, Outcome.SLOWER),
        (1.6, 3.2, {}, 0.7, Outcome.SAME),
        (3.2, 3.2, {}, 0.0, Outcome.SAME),  # the base misses the bar by as much
        (2.2, 3.2, {}, 0.0, Outcome.SLOWER),  # and here by less
        (1.6, 3.2, {CANDIDATE: 9.0}, 0.0, Outcome.SLOWER),  # no change raises its own bar
        (1.6, 3.2, {BASE: 9.0, CANDIDATE: 9.0}, 0.0, Outcome.SAME),
        (None, 1.9, {}, 0.0, Outcome.NEW),
        (None, 20.0, {}, 0.0, Outcome.SLOWER),
        (None, 3.2, {}, 0.7, Outcome.NEW),
    ],
)
def test_a_layout_above_the_ops_bar_is_slower_unless_accepted_or_the_base_is_as_slow(
    base: float | None,
    candidate: float,
    bars: dict[str, float],
    accepted: float,
    outcome: Outcome,
) -> None:
    """Times as long as on contiguous inputs. Their own times are the same on both sides, or the
    candidate's contiguous ones are shorter."""
    script = Script("a", "a-strided", "b")
    for side, ratio in ((BASE, base), (CANDIDATE, candidate)):
        script.bars[side, "a-strided"] = bars.get(side, 2.0)
        contiguous = {metric: seconds / (ratio or 1.0) for metric, seconds in SECONDS.items()}
        script.on(side, "turn", contiguous, "a")
        script.on(side, "turn", SECONDS, "a-strided")
    if base is None:
        script.names[BASE] = ["b"]
    if accepted:
        script.accept("a-strided", "layouts", accepted)
    verdicts = script.run()
    assert verdicts["a-strided"].outcome is outcome
    assert script.status == outcome.status
    report = script.session.report()["benchmarks"]["a-strided"]
    (figure,) = [f for f in report["figures"] if f["metric"] == "layouts strided"]
    assert figure["after"] == pytest.approx(candidate)
    if base is None:
        asked = {(side, args[0]) for _, side, method, args in script.requests if method == "turn"}
        assert {side for side, name in asked if name != "b"} == {CANDIDATE}


def test_new_benchmarks_without_a_bar_are_not_timed() -> None:
    script = Script("b")
    script.names[CANDIDATE] = ["b", "a", "a-strided"]
    assert script.run()["a-strided"].outcome is Outcome.NEW
    assert {args[0] for *_, method, args in script.requests if method == "turn"} == {"b"}
