"""Inputs that are not contiguous, in the gate: which calls are timed on them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE
from correctness_tests.support.launched import tree_ops
from correctness_tests.support.tried import derived
from tinyllama.harness.declare.op import Op
from tinyllama.harness.gate import benchmarks as side_file
from tinyllama.harness.gate.benchmarks import Benchmark, Registered, declared
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.gate.worker import Side
from tinyllama.harness.measure.op_contender import ops_of

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
    assert {name for name in benchmarks if "-manual-" in name} == {PLAIN, STRIDED, TRANSPOSED}


def test_the_slowest_layout_is_the_first_that_the_op_names(weigh: Op) -> None:
    weigh.layouts = {"transposed": 3.0}
    assert not listed()[TRANSPOSED].further
    assert STRIDED not in listed()
    del weigh.layouts  # as in a base that is older
    assert {name for name in listed() if "-manual-" in name} == {PLAIN}


def test_on_a_gpu_a_provider_with_kernels_has_benchmarks_of_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_file, "cannot", lambda need, device: None)
    monkeypatch.setattr(side_file, "untimed", lambda *args: None)
    more = [b for b in declared(GPU, TREE) if b.timed.layout != "contiguous"]
    kernels = {str(p) for op in tree_ops() for p in op.providers.values() if p.derived}
    for further in (False, True):
        timed = [f"{b.timed.op}-{b.timed.provider}" for b in more if b.further is further]
        assert sorted(timed) == sorted(kernels)
    assert kernels >= {"rms_norm-triton", "cross_entropy-triton", "linear-triton"}
    assert all([*benchmark.slowdowns] == [DEVICE] for benchmark in more), "host time is not"


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
    side.proofs(STRIDED)
