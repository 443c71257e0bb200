"""`make bench` and its short set of groups."""

import subprocess
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import ROOT
from correctness_tests.support.launched import tree_ops
from tinyllama.bench import measure_ops
from tinyllama.bench.measure_ops import Bench
from tinyllama.bench.workloads import SHORT_OPS, SHORT_STEPS

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_of_each_op_the_largest_case_is_timed() -> None:
    """But for those that the training steps of the short set contain."""
    short = Bench("bf16", GPU, tree_ops(), short=True)
    assert [(run.op, run.case) for run in short.runs] == [
        (op, len(op.timed) - 1) for op in tree_ops() if op.name not in ("block", "stack")
    ]
    assert len(Bench("bf16", GPU, tree_ops()).runs) > len(short.runs)


def test_short_groups_are_parts_of_groups_on_a_gpu_and_all_of_them_on_a_cpu() -> None:
    assert measure_ops.short_groups(CPU) == measure_ops.groups(CPU)
    assert measure_ops.short_groups(GPU) == [*SHORT_OPS]
    assert not {*SHORT_OPS, *SHORT_STEPS} & {*measure_ops.groups(GPU)}


@pytest.mark.parametrize(
    ("failing", "status"), [("nothing", 0), ("train", 1), ("pytest", 15), ("report", 1)]
)
def test_make_bench_ends_with_a_page_and_the_first_failures_status(
    failing: str, status: int, tmp_path: Path
) -> None:
    """Also where a group could not be measured, as where it timed out."""
    command = tmp_path / "run"
    fails = f'case "$1 $2" in *{failing}*) exit {status};; esac'
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{fails}\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["make", "--old-file=bootstrap", "bench", f"RUN={command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["tinyllama", "pytest", "tinyllama"]
    assert "report" in calls[-1]
    assert bool(done.returncode) is bool(status)
    said = f"bench: not all was measured and met (status {status})"
    assert (said in done.stdout.splitlines()) is bool(status)
