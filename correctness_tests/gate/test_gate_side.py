"""Which benchmarks a side says that it has."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE
from correctness_tests.support.launched import tree_ops
from tinyllama.harness import Case, Op
from tinyllama.harness.gate import benchmarks as module
from tinyllama.harness.gate.benchmarks import FURTHER, ON_CPU, ON_GPU, Registered, declared
from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.measure.op_contender import ops_of
from tinyllama.ops import OPS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TREE, REGISTERED = Registered(PACKAGE), Registered(PACKAGE, FILES)  # with the toy op
WEIGHED = "weigh_rows-eager-N16D64-fp32/forward+backward"


@pytest.fixture
def weigh() -> Iterator[Op]:
    """The toy op, which may be changed."""
    op = ops_of(PACKAGE, FILES)["weigh_rows"]
    before = op.timed, dict(op.slowdowns), dict(op.providers)
    yield op
    op.timed, op.slowdowns, op.providers = before


@pytest.fixture
def as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cannot", lambda need, device: None)
    monkeypatch.setattr(module, "untimed", lambda *args: None)


def names() -> list[str]:
    return [benchmark.name for benchmark in declared(CPU, REGISTERED)]


# -- what there is ----------------------------------------------------------------------------


def test_on_a_cpu_kernels_are_listed_to_be_verified_and_all_others_to_be_timed() -> None:
    listed = {(b.timed.op, b.timed.provider): b for b in declared(CPU, REGISTERED)}
    for op in tree_ops():
        for provider in op.providers.values() if op.timed else ():
            benchmark = listed[op.name, provider.name]
            assert bool(benchmark.untimed) == ("triton" in provider.requires), provider
            assert bool(benchmark.slowdowns) != bool(benchmark.untimed)
    timed = [benchmark for benchmark in listed.values() if not benchmark.untimed]
    assert {(b.timed.case, b.timed.dtype) for b in timed} == {(0, "fp32")}


@pytest.mark.usefixtures("as_with_a_gpu")
def test_on_a_gpu_device_time_is_of_the_largest_case_and_host_time_of_the_smallest(
    weigh: Op,
) -> None:
    """Each case between these has a further benchmark, with no smaller tolerance than others. Of
    the reference the smallest is timed alone."""
    weigh.providers["plain"] = replace(weigh.providers["eager"], name="plain")
    weigh.timed = [Case(N=n, D=n) for n in (8, 16, 24, 32)]
    weigh.slowdowns = {DEVICE: 0.3}
    listed = {(b.timed.op, b.timed.provider, b.timed.case): b for b in declared(GPU, REGISTERED)}
    reference = [b for (*names, _), b in listed.items() if names == ["weigh_rows", "eager"]]
    assert [b.slowdowns for b in reference] == [{HOST: ON_GPU[HOST]}]
    assert reference[0].timed.case == 0
    benchmarks = {
        case: b for (*names, case), b in listed.items() if names == ["weigh_rows", "plain"]
    }
    assert {case: benchmark.slowdowns for case, benchmark in benchmarks.items()} == {
        0: {HOST: ON_GPU[HOST]},
        **{case: {DEVICE: 0.3} for case in (1, 2, 3)},
    }
    assert [case for case, benchmark in benchmarks.items() if benchmark.further] == [1, 2]
    weigh.slowdowns = {}
    further = [b for b in declared(GPU, REGISTERED) if b.further and b.timed.op == weigh.name]
    assert {benchmark.slowdowns[DEVICE] for benchmark in further} == {FURTHER}


def test_a_name_says_op_provider_case_type_and_passes_and_is_there_once() -> None:
    assert WEIGHED in names()
    assert len(set(names())) == len(names())
    assert all(
        benchmark.module == OPS[benchmark.timed.op].module for benchmark in declared(CPU, TREE)
    )


@pytest.mark.usefixtures("as_with_a_gpu")
def test_a_provider_that_cannot_be_queued_is_verified_and_not_timed(weigh: Op) -> None:
    weigh.providers["eager"] = replace(weigh.providers["eager"], waits=True)
    untimed = {b.name: b.untimed for b in declared(GPU, REGISTERED) if b.untimed}
    assert "fill its queue" in untimed["weigh_rows-eager/results"]
    assert WEIGHED in names(), "on a CPU there is no queue"


def test_a_provider_says_which_file_registered_it(weigh: Op) -> None:
    (benchmark,) = (
        benchmark for benchmark in declared(CPU, REGISTERED) if benchmark.name == WEIGHED
    )
    assert benchmark.registered == weigh.module == benchmark.module
    code = "op.provider('elsewhere')(op['eager'].call)"
    exec(code, {"op": weigh, "__name__": "ops.of_another_file"})
    benchmarks = [
        benchmark for benchmark in declared(CPU, REGISTERED) if "-elsewhere-" in benchmark.name
    ]
    assert [(benchmark.module, benchmark.registered) for benchmark in benchmarks] == [
        (weigh.module, "ops.of_another_file")
    ]


def test_a_provider_that_cannot_run_the_timed_case_is_verified_on_others(weigh: Op) -> None:
    eager = weigh.providers["eager"]
    weigh.providers["half"] = replace(eager, name="half", dtypes=(torch.bfloat16,))
    weigh.providers["small"] = replace(eager, name="small", supports=lambda dims: "too large")
    assert [name for name in names() if name.startswith("weigh")] == [
        WEIGHED,
        WEIGHED.replace("eager", "float32_only"),
        "weigh_rows-half/results",
        "weigh_rows-small/results",
    ]


# -- tolerances -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "on_cpu", "on_gpu"),
    [
        ({}, ON_CPU, ON_GPU),
        ({DEVICE: 0.01}, ON_CPU, {**ON_GPU, DEVICE: 0.01}),  # a CPU is not as quiet
        ({DEVICE: 0.3}, {DEVICE: 0.3}, {**ON_GPU, DEVICE: 0.3}),
        ({HOST: 0.05}, ON_CPU, {**ON_GPU, HOST: 0.05}),
    ],
)
@pytest.mark.parametrize("who", ["op", "provider"])
@pytest.mark.usefixtures("as_with_a_gpu")
def test_tolerances_are_those_that_an_op_or_its_provider_states(
    weigh: Op,
    who: str,
    stated: Mapping[str, float],
    on_cpu: Mapping[str, float],
    on_gpu: Mapping[str, float],
) -> None:
    if who == "op":
        weigh.slowdowns = stated
    else:
        weigh.slowdowns = dict.fromkeys(stated, 0.5)
    own = stated if who != "op" else {}
    weigh.providers["plain"] = replace(weigh.providers["eager"], name="plain", slowdowns=own)
    for device, expected in ((CPU, on_cpu), (GPU, on_gpu)):
        slowdowns: dict[str, float] = {}
        for benchmark in declared(device, REGISTERED):
            if (benchmark.timed.op, benchmark.timed.provider) == ("weigh_rows", "plain"):
                slowdowns.update(benchmark.slowdowns)
        assert slowdowns == expected


@pytest.mark.parametrize(
    "stated",
    [{"device_second": 0.01}, {DEVICE: 0}, {DEVICE: -0.1}, {HOST: float("nan")}, {DEVICE: "1%"}],
    ids=str,
)
def test_an_unknown_metric_or_an_invalid_tolerance_is_an_error(
    weigh: Op, stated: dict[str, Any]
) -> None:
    weigh.slowdowns = stated
    with pytest.raises(ValueError, match="op 'weigh_rows': slowdowns of '"):
        declared(CPU, REGISTERED)
    weigh.slowdowns = {}
    weigh.providers["eager"] = replace(weigh.providers["eager"], slowdowns=stated)
    with pytest.raises(ValueError, match="weigh_rows-eager: slowdowns of '"):
        declared(CPU, REGISTERED)
