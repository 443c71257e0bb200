"""Each stage of the debugging journey has its fault, and its check finds that and nothing else."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.commands import printed, refused
from correctness_tests.support.queues import SimulatedQueue
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.measure.clock import wall_seconds
from tinyllama.harness.records.results import records
from tinyllama.ops import OPS
from tinyllama.workshop import contender, running, strided
from tinyllama.workshop.contender import StageStep, Unwaited
from tinyllama.workshop.stages import STAGES

WHERE: dict[str, Any] = {"group": "tiny-fp32", "device": "cpu", "batch_size": 1, "seq_len": 8}
BROKEN = [stage for stage in STAGES.values() if stage.fault]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


@pytest.mark.long
@pytest.mark.parametrize("stage", BROKEN, ids=lambda stage: stage.fault)
def test_check_of_stage_is_red_and_its_fix_is_green(stage: Any) -> None:
    if stage.check in ("dense inputs", "products by BLAS") and not HAS_TRITON:
        pytest.skip("triton is not installed")
    outcome, message = StageStep(stage.number, **WHERE).check(stage.check)
    fixed, nothing = StageStep(stage.number, fixed=True, **WHERE).check(stage.check)
    if stage.check == "phases add up":
        assert (outcome, fixed) == ("unsupported", "unsupported")
        assert "needs a GPU" in message
    else:
        assert (outcome, fixed, nothing) == ("failed", "passed", "")
        assert message


@pytest.mark.long
@needs_triton
def test_hybrid_passes_every_check() -> None:
    step = StageStep(5, **WHERE)
    outcomes = {name: step.check(name)[0] for name in contender.CHECKS}
    assert outcomes.pop("phases add up") == "unsupported"
    assert set(outcomes.values()) == {"passed"}


def test_phases_by_a_clock_that_does_not_wait_do_not_add_up() -> None:
    queue = SimulatedQueue(launch=1e-6)

    def work() -> None:
        queue.enqueue(1e-3)

    waited, unwaited = wall_seconds(work, queue), wall_seconds(work, Unwaited(queue))
    assert contender.difference(3 * unwaited, 3 * waited)
    assert contender.difference(3 * waited, 3 * waited) is None


def test_without_a_backward_only_the_embedding_learns() -> None:
    step = StageStep(6, **WHERE)
    assert set(step.lost()) == step.parameters.keys() - {"embedding"}
    assert StageStep(5, **WHERE).lost() == []
    before = {name: p.detach().clone() for name, p in step.parameters.items()}
    step.next()
    changed = {name for name, p in step.parameters.items() if not torch.equal(p, before[name])}
    assert changed == {"embedding"}


@pytest.mark.long
def test_on_text_a_stage_without_a_backward_learns_no_more_than_an_embedding() -> None:
    losses = StageStep(6, **{**WHERE, "batch_size": 4, "seq_len": 32}).text_losses(60)
    last = {name: sum(series[-10:]) / 10 for name, series in losses.items()}
    assert last["every parameter"] < last["embedding alone"] - 0.1
    assert last["this stage"] >= last["embedding alone"] - 0.02


@needs_triton
@pytest.mark.parametrize("dense", [False, True])
def test_strided_kernel_is_right(dense: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, 37, 4, 24), (2, 37, 2, 24), (2, 37, 2, 24))
    inputs = [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]
    upstream = torch.randn(shapes[0], generator=rng)
    output = strided.attention(*inputs, dense=dense)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = OPS["attention"]["eager"].call(*exact)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(output, inputs, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-5)


# -- the command --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_command_prints_table_and_leaves_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contender, "TEXT_STEPS", 4)
    folder = tmp_path / "stages"
    text = printed("stages", "6", "1", "6", "--device", "cpu", "--output", folder)
    assert text.count("RED") == text.count("GREEN") == (2 if HAS_TRITON else 1)
    assert "No weight init" in text
    names = {f"stage{n}_{what}" for n in (1, 6) for what in ("output.log", "profile.csv")}
    assert {path.name for path in folder.iterdir()} == {*names, "comparison.md"}
    with open(folder / "stage6_profile.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage"]
    assert all(len(row) == 5 for row in rows)
    assert float(rows[1][2]) >= float(rows[2][2]), "the slowest comes first"
    assert not list(records(tmp_path)), "no file of the stages is a record"
    profiles = [folder / f"stage{n}_profile.csv" for n in (1, 6)]
    assert "launches in" in printed("profile", "compare", *profiles)


@pytest.mark.parametrize(("hybrid", "optimal"), [(0.1, True), (0.3, False)])
def test_only_the_fastest_right_stage_is_called_optimal(hybrid: float, optimal: bool) -> None:
    seconds = {0: 0.2, 4: 0.25, 5: hybrid, 6: 0.01}  # stage 6 is wrong, and fast
    stages = [
        running.Measured(
            running.BASELINE if number == 0 else STAGES[number],
            first_loss=6.9,
            memory={"peak_bytes": 2**20},
            seconds=[s] * 9,
        )
        for number, s in seconds.items()
    ]
    text = running.comparison(stages, torch.device("cpu"))
    assert ("OPTIMAL" in text) is optimal
    assert ("none, but v1 is faster here" in text) is not optimal


def test_commas_in_names_stay_in_one_column() -> None:
    kernels = {'void f<float, 4>(int*, "x")\n': (2, 3e-6)}
    row = running.profile_csv(kernels).splitlines()
    assert row[1].count(",") == 4
    assert row[1].endswith(",2,3000,1500,100.00")


def test_values_that_cannot_be_used_are_one_error() -> None:
    assert "from 1 to 6" in refused("stages", "7")
    assert "--output /dev/null/x" in refused("stages", "--output", "/dev/null/x")
