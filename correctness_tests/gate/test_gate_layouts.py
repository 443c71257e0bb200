"""Inputs that are not contiguous, in the gate: which calls are timed on them, what their bars
decide, and that it finds who copies such inputs alone."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE, weighed
from correctness_tests.support.gate_fakes import SIDES, Script
from correctness_tests.support.gate_subjects import Make, Turning, reads_device_time, verified
from correctness_tests.support.launched import tree_ops
from correctness_tests.support.tried import derived
from tinyllama.harness.declare.op import Op
from tinyllama.harness.gate import benchmarks as side_file
from tinyllama.harness.gate.benchmarks import Benchmark, declared
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.worker import Side
from tinyllama.harness.measure.op_contender import WrongResultError, ops_of
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.verdict import Outcome

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN = "weigh_rows-manual-N16D64-fp32/forward+backward"
STRIDED = "weigh_rows-manual-N16D64-fp32-strided/forward+backward"


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
    benchmarks = {benchmark.name: benchmark for benchmark in declared(device, PACKAGE, FILES)}
    return {name: benchmark for name, benchmark in benchmarks.items() if name.startswith("weigh")}


# -- which are timed --------------------------------------------------------------------------


def test_a_provider_with_its_own_backward_is_timed_on_the_slowest_layout(weigh: Op) -> None:
    benchmarks = listed()
    assert {PLAIN, STRIDED} < set(benchmarks)
    assert [name for name in benchmarks if "strided" in name or "transposed" in name] == [STRIDED]
    assert benchmarks[STRIDED] == replace(
        benchmarks[PLAIN],
        name=STRIDED,
        timed=replace(benchmarks[PLAIN].timed, layout="strided"),
        layouts={"strided": 2.0, "transposed": 2.0},
    )
    weigh.layouts = {"transposed": 3.0}
    (transposed,) = set(listed()) - set(benchmarks)
    assert transposed == STRIDED.replace("strided", "transposed")
    assert listed()[transposed].layouts == {"transposed": 3.0}


def test_an_op_from_before_there_were_layouts_is_timed_on_contiguous_inputs(weigh: Op) -> None:
    weigh.layouts = {}
    assert STRIDED not in listed()
    del weigh.layouts  # as in a base that is older
    assert STRIDED not in listed()
    assert PLAIN in listed()


def test_on_a_gpu_a_provider_with_kernels_has_a_benchmark_of_a_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_file, "cannot", lambda need, device: None)
    monkeypatch.setattr(side_file, "untimed", lambda *args: None)
    benchmarks = declared(GPU, PACKAGE)
    more = [benchmark for benchmark in benchmarks if benchmark.timed.layout != "contiguous"]
    kernels = {str(p) for op in tree_ops() for p in op.providers.values() if p.derived}
    assert sorted(
        f"{benchmark.timed.op}-{benchmark.timed.provider}" for benchmark in more
    ) == sorted(kernels)
    assert kernels >= {"rms_norm-triton", "cross_entropy-triton", "linear-triton"}
    for benchmark in more:
        contiguous = next(
            x for x in benchmarks if replace(benchmark.timed, layout="contiguous") == x.timed
        )
        assert benchmark.slowdowns == {DEVICE: contiguous.slowdowns[DEVICE]}, "host time is not"
        assert benchmark.layouts.keys() == {"strided", "transposed"}
        assert max(benchmark.layouts.values()) <= 2.0


# -- what a side gives ------------------------------------------------------------------------


@pytest.mark.usefixtures("weigh")
def test_a_side_times_calls_on_the_layout() -> None:
    side = Side("cpu", PACKAGE, FILES)
    for name in (PLAIN, STRIDED):
        side.begin(name, (DEVICE,))
        side.verify(name, 1)
        side.make_ready(name, None, warm_up=0.0)
        assert side.turn(name, 1)[DEVICE] > 0
    inputs = {name: side.subjects[name].args["x"] for name in (PLAIN, STRIDED)}
    assert {name: x.is_contiguous() for name, x in inputs.items()} == {PLAIN: True, STRIDED: False}
    assert side.inputs(PLAIN) == side.inputs(STRIDED), "the same values"
    side.compile_layouts(STRIDED, ("transposed",))
    ((layout, times),) = side.layouts(STRIDED, ("transposed",)).items()
    assert layout == "transposed"
    assert 0 < times.low <= times.median <= times.high
    side.turn(STRIDED, 2, 3)
    side.proofs(STRIDED)
    assert not side.subjects[STRIDED].args["x"].is_contiguous(), "the usual one again"


def copies_what_is_strided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A copy that takes as long as that of a large tensor."""
    if not x.is_contiguous():
        time.sleep(5e-3)
        if x.device.type != "cpu":
            torch.cuda._sleep(10_000_000)
        x = x.contiguous()
    return weighed(x, weight)


@reads_device_time
def test_a_copy_of_strided_inputs_slows_noncontiguous_layouts_alone(subject: Make) -> None:
    right, slow = (
        subject(call, layout="strided").layouts(("strided", "transposed"), 8)
        for call in (weighed, copies_what_is_strided)
    )
    for layout in ("strided", "transposed"):
        assert right[layout].median < 4 < slow[layout].median
    contiguous = subject(copies_what_is_strided).layouts(("contiguous",), 8)["contiguous"]
    assert contiguous.median < 4


def test_results_of_another_layout_must_be_right(subject: Make) -> None:
    call = Turning(lambda x, weight: weighed(x, weight) * (1.0 if x.is_contiguous() else 1.02))
    timed_call = subject(call)
    timed_call.compile_layouts(("transposed",))
    call.turned = True
    verified(timed_call)
    with pytest.raises(WrongResultError, match="transposed inputs: y: error"):
        timed_call.compile_layouts(("transposed",))


# -- what the bars decide ---------------------------------------------------------------------

FAST = {"strided": Ratio(1.5, 1.4, 1.6), "transposed": Ratio(2.1, 1.9, 2.3)}
SLOW = {**FAST, "strided": Ratio(2.9, 2.8, 3.0)}


@pytest.mark.parametrize(
    ("ratios", "bars", "base", "accepted", "outcome", "said"),
    [
        (FAST, {}, 1.6, 0.0, Outcome.SAME, ""),
        (SLOW, {}, 1.6, 0.0, Outcome.SLOWER, "2.90 [2.80, 3.00] times as long as contiguous"),
        (SLOW, {}, 1.6, 0.5, Outcome.SAME, ""),
        (SLOW, {}, 1.6, 0.3, Outcome.SLOWER, "allowed 2.6"),
        (SLOW, {}, 2.79, 0.0, Outcome.SLOWER, "the base takes"),
        (SLOW, {}, 2.8, 0.0, Outcome.SAME, ""),  # the base misses the bar by as much
        (SLOW, {BASE: 9.0}, 1.6, 0.0, Outcome.SLOWER, ""),
        (SLOW, {CANDIDATE: 9.0}, 1.6, 0.0, Outcome.SLOWER, ""),  # no change raises its own bar
        (SLOW, {BASE: 9.0, CANDIDATE: 9.0}, 1.6, 0.0, Outcome.SAME, ""),
        ({"transposed": FAST["transposed"]}, {}, 1.6, 0.0, Outcome.MISSING, "not measured"),
    ],
)
@pytest.mark.parametrize("new", [False, True])
def test_a_layout_above_its_bar_is_slower_unless_that_is_accepted_or_the_base_is_as_slow(
    ratios: Mapping[str, Ratio],
    bars: Mapping[str, float],
    base: float,
    accepted: float,
    outcome: Outcome,
    said: str,
    new: bool,
) -> None:
    if new and (bars or base != 1.6):
        pytest.skip("there is no base")
    script = Script("a", "b")
    for side in SIDES:
        script.bars[side, "a"] = {"strided": bars.get(side, 2.0), "transposed": 2.0}
    script.on(CANDIDATE, "layouts", ratios, "a")
    script.on(BASE, "layouts", {"strided": Ratio(base - 0.05, base - 0.1, base)}, "a")
    if accepted:
        script.accept("a", "layouts", accepted)
    if new:
        script.names[BASE].remove("a")
        said = said if said != "the base takes" else ""
    verdict = script.run()["a"]
    assert verdict.outcome is (Outcome.NEW if new and outcome is Outcome.SAME else outcome)
    assert said in verdict.text
    assert not script.confirming, "the bar is no comparison of sides"
    requests = [
        args for _, side, what, args in script.requests if (side, what) == (BASE, "layouts")
    ]
    assert len(requests) <= 1, "of the base what the candidate misses alone, in the first block"
