"""The short set: what a bar is about, the largest case of each op, and fewer rounds."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.launched import tree_ops
from perf_tests import conftest as perf_conftest
from tinyllama.bench import measure as steps
from tinyllama.bench import measure_ops
from tinyllama.bench.measure import CONTENDERS, NOT_SHORT, SHORT, measure
from tinyllama.bench.measure_ops import Bench, OpCaseRun
from tinyllama.bench.targets import OF_OPS, OF_STEPS
from tinyllama.bench.workloads import SHORT_OPS, SHORT_STEPS, Group
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.plugins.recording import NotMeasured
from tinyllama.ops import OPS
from tinyllama.suites import timings

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("workload", ["small", "medium"])
def test_contenders_and_rounds_of_steps_are_fewer(
    workload: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts = []
    monkeypatch.setattr(steps.Run, "time", lambda run: efforts.append(run.effort))
    nowhere = tuple(replace(one, requires=("module nowhere",), only=None) for one in CONTENDERS)
    cannot = measure(Group(workload, "bf16"), CPU, nowhere, short=short).cannot
    assert set(cannot) == {one.name for one in CONTENDERS}
    left_out = {name for name, reason in cannot.items() if reason == NOT_SHORT}
    assert left_out == (set(cannot) - set(SHORT[workload]) if short else set())
    usual = steps.Effort.on(CPU)
    assert efforts == [usual.short() if short else usual]
    assert steps.Effort.on(GPU).short().total < steps.Effort.on(GPU).total


def test_of_each_op_the_last_case_is_timed() -> None:
    every = Bench("bf16", GPU, tree_ops())
    short = Bench("bf16", GPU, tree_ops(), short=True)
    assert [(run.op, run.case) for run in short.runs] == [
        (op, len(op.timed) - 1) for op in tree_ops() if op.name not in ("block", "stack")
    ]
    assert len(every.runs) > len(short.runs)
    assert short.effort.warm_up < every.effort.warm_up


@pytest.mark.parametrize(
    ("cannot", "failed", "raised", "said"),
    [
        ({"triton": "no GPU"}, {}, NotMeasured, "triton: no GPU"),
        ({}, {"triton": WorkerError("wrong")}, pytest.fail.Exception, "wrong"),
        ({}, {}, AssertionError, "nothing says why"),
    ],
)
def test_what_is_not_measured_is_skipped_only_with_a_reason(
    cannot: dict[str, str], failed: dict[str, WorkerError], raised: Any, said: str
) -> None:
    op, table = OPS["silu_mul"], Mock()
    run = OpCaseRun(op, 0, "fp32", cannot=cannot, failed=failed)
    measured: Any = ({f"{op.name}-{op.timed[0]}": run}, [])
    # A skip that is not caught would skip this test, too.
    with pytest.raises((NotMeasured, AssertionError, pytest.fail.Exception), match=said) as found:
        timings.test_op(measured, op, "triton", 0, table)
    assert found.type is raised
    with pytest.raises(NotMeasured, match="is not a case of this group"):
        timings.test_op(({}, []), op, "triton", 0, table)
    assert not table.enter.called


def test_on_a_gpu_the_short_set_is_nothing_but_parts_of_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=""), workerinput={})
    monkeypatch.setattr(perf_conftest, "worker_device", lambda config: GPU)
    short = perf_conftest.pytest_tinyllama_short_groups(config)
    assert short == ["small-bf16-short", "medium-bf16-short", "ops-bf16-short"]
    monkeypatch.setattr(perf_conftest, "worker_device", lambda config: CPU)
    every = perf_conftest.pytest_tinyllama_groups(config)
    assert perf_conftest.pytest_tinyllama_short_groups(config) == every
    assert {"tiny-fp32", "ops-fp32"} <= {*every}


def test_the_tests_of_targets_hold_what_was_measured_to_every_bar_of_the_file() -> None:
    """Here those tests are what is tested."""
    test_steps, test_ops = map(import_module, ("perf_tests.test_steps", "perf_tests.test_ops"))
    measured = steps.Measured(Group("tiny", "fp32"))
    held: Any = Mock()
    test_steps.test_targets(test_steps.Found(measured, {}), held, CPU)
    (found,) = held.hold.call_args.args
    assert found == steps.bars(OF_STEPS, measured, {}, device_name(CPU))
    assert found
    op = OPS["rms_norm"]
    run = OpCaseRun(op, 0, "fp32", cannot=dict.fromkeys(measure_ops.providers_of(op), "no GPU"))
    runs = {f"{op.name}-{op.timed[0]}": run}
    entries = measure_ops.entries_of(run, Mock())
    test_ops.test_targets((runs, entries), held, CPU)
    (found,) = held.hold.call_args.args
    assert found == measure_ops.bars(OF_OPS, runs, entries, device_name(CPU))
    assert found
    for one in (test_steps.test_targets, test_ops.test_targets, test_ops.test_layouts):
        assert [mark.name for mark in vars(one)["pytestmark"]] == ["target"]


def test_a_cpu_has_no_parts_of_groups() -> None:
    assert measure_ops.short_groups(CPU) == measure_ops.groups(CPU)
    assert measure_ops.short_groups(GPU) == [*SHORT_OPS]
    assert not {*SHORT_OPS, *SHORT_STEPS} & {*measure_ops.groups(GPU)}
