"""Parts of training, each by itself: how a run ends, what is diagnosed, what a curve shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch

from correctness_tests.support.runs import CONFIG, MODEL, PARAMETERS, run, saved
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.training import curve, data, train
from tinyllama.training.data import RandomTokens, TextBytes
from tinyllama.training.diagnose import Diagnosis, Observed, Statistics, diagnose, gradients
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.step import TrainStep

TWO = Ranks(0, 2)
FINE, SICK = Statistics(0.0, 1.0, 0.5, 0.0), Statistics(None, None, None, 1.0)


def a_step(**settings: Any) -> TrainStep:
    plan = settings.pop("plan", None)
    return TrainStep(TinyLlama(MODEL), replace(CONFIG, **settings), plan)


# -- how a run goes on and ends ----------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_saves_after_every_so_many_steps_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, done: int
) -> None:
    resume = saved(tmp_path / "first", done) if done else None
    monkeypatch.setattr(train, "save", save := Mock())
    for every, steps in ((2, [2, 3]), (3, [3, 3]), (None, [3])):
        save.reset_mock()
        run(num_steps=3, save_to=tmp_path / "a", save_every=every, resume=resume)
        kind = {"kind": "random tokens"}
        assert save.mock_calls == [
            call(tmp_path / "a", ANY, done + number, kind, interrupted=False) for number in steps
        ]
    save.reset_mock()
    run(num_steps=1, save_every=1)
    save.assert_not_called()


def a_run(**fields: Any) -> Any:
    """A run in progress that has done no step."""
    made: Any = object.__new__(train._Run)
    scaler = SimpleNamespace(is_enabled=lambda: fields.pop("fp16", False))
    ranks = fields.pop("ranks", ALONE)
    stepped = SimpleNamespace(
        ranks=ranks, scaler=scaler, device="d", norm=None, loss=torch.ones(())
    )
    result = SimpleNamespace(start=4, losses=[1.0], status="completed", reason=None, diagnoses=[])
    vars(made).update(step=stepped, result=result, diagnose_at=(), **fields)
    return made


@pytest.mark.parametrize(
    ("loss", "norm", "fp16", "wrong"),
    [
        (1.0, None, False, None),
        (1.0, 2.0, False, None),
        (math.nan, None, False, "the loss of step 6 is nan"),
        (math.inf, math.nan, True, "the loss of step 6 is inf"),
        (1.0, math.inf, False, "the gradients' norm of step 6 is inf"),
        (1.0, math.inf, True, None),
    ],
)
def test_a_number_that_is_not_finite_is_named(
    loss: float, norm: float | None, fp16: bool, wrong: str | None
) -> None:
    made = a_run(fp16=fp16)
    made.step.scaler = SimpleNamespace(is_enabled=lambda: fp16)
    assert made._wrong(loss, norm) == wrong
    assert made._numbers() == (1.0, None)
    made.step.norm = torch.tensor(3.0)
    assert made._numbers() == (1.0, 3.0)


def told(*answers: str | None) -> Ranks:
    """Two ranks, of which the second one gives these answers."""
    left = iter(answers)

    class Told(Ranks):
        def gathered(self, mine: Any) -> list[Any]:
            return [mine, next(left)]

    return Told(0, 2)


@pytest.mark.parametrize(
    ("ops", "ranks", "fault", "at", "reason"),
    [
        ((FINE, None), ALONE, "a fault", (), "wrong: a fault"),
        ((SICK, FINE), ALONE, "", (), "wrong: the first op whose output is not finite is one"),
        (
            (FINE, SICK),
            ALONE,
            "",
            (5,),
            "wrong: the last op whose output's gradient is not finite is one",
        ),
        (
            (FINE, FINE),
            ALONE,
            "",
            (2,),
            "wrong: run uncompiled, every op's output is finite: switch parts of the tier off",
        ),
        (
            (SICK, FINE),
            told(None, "there"),
            "",
            (),
            "wrong: the first op whose output is not finite is one on rank 0",
        ),
        ((FINE, FINE), told(None, "there"), "", (), "wrong: there on rank 1"),
        ((SICK, FINE), told(None), "a fault", (), "wrong: a fault (rank 0)"),
        ((SICK, FINE), told("a fault"), "", (), "wrong: a fault (rank 1)"),
    ],
)
def test_a_step_that_went_wrong_is_explained(
    ops: tuple[Statistics, Statistics | None],
    ranks: Ranks,
    fault: str,
    at: tuple[int, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Diagnosis(6, None, (Observed("one", *ops),))
    diagnosed = Mock(return_value=found)
    monkeypatch.setattr(train, "diagnose", diagnosed)
    monkeypatch.setattr(train, "WATCHDOG", SimpleNamespace(fault=lambda device: fault))
    made = a_run(ranks=ranks)
    made.diagnose_at = at
    made._explain("wrong", (1, 2), 2)
    assert (made.result.status, made.result.reason) == ("failed", reason)
    asked = [call.args for call in diagnosed.call_args_list]
    assert asked == ([] if "a fault" in reason else [(made.step, 1, 2, 6)])
    assert made.result.diagnoses == ([found] if at == (5,) else []), "2 was diagnosed before"


def test_a_run_that_two_signals_could_end_is_marked() -> None:
    made = a_run()
    made._fail("why")
    assert (made.result.status, made.result.reason) == ("failed", "why")
    assert made.done == 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_generators_of_the_cpu_and_of_this_device_are_seeded(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "default_generator", mine := Mock())
    monkeypatch.setattr(torch.cuda, "manual_seed", gpu := Mock())
    train._seed(7, torch.device(device))
    assert mine.mock_calls == [call.manual_seed(7)]
    assert gpu.mock_calls == ([call(7)] if device == "cuda" else [])


# -- diagnoses ---------------------------------------------------------------------------------


def test_the_first_output_and_the_last_gradient_are_named() -> None:
    ops = tuple(
        Observed(name, output, gradient)
        for name, output, gradient in (
            ("a", FINE, SICK),
            ("b", SICK, SICK),
            ("c", SICK, FINE),
            ("d", FINE, None),
        )
    )
    found = Diagnosis(1, None, ops)
    assert found.first_nonfinite is ops[1]
    assert found.last_nonfinite_gradient is ops[1]
    last = Diagnosis(1, None, (*ops[:1], Observed("z", SICK)))
    assert (last.first_nonfinite or ops[0]).name == "z"
    assert last.last_nonfinite_gradient is ops[0]
    assert Diagnosis(1, 2.0, (Observed("z", FINE, FINE),)).first_nonfinite is None


def test_gradients_of_zero_are_no_gradients() -> None:
    """One micro-batch is enough for "received", and for "not finite", whichever comes first."""
    one = a_step(accumulate=2)
    batch = RandomTokens(MODEL.vocab_size, one.config).batch(0)
    norm = one.model.norm
    factors: list[float] = []
    left: Iterator[float]

    def scaled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm(
            x, weight * 0 + weight.detach() + (weight - weight.detach()) * next(left), eps=eps
        )

    one.model.norm = scaled
    for factors, expected in (
        ([0.0, 0.0], "all zero"),
        ([0.0, 1.0], "received"),
        ([1.0, 0.0], "received"),
        ([1.0, math.nan], "not finite"),
        ([math.nan, 1.0], "not finite"),
    ):
        left = iter(factors)
        found = gradients(one, *batch)
        assert found.pop("final_norm") == expected, factors
        assert set(found.values()) <= {"received", "not finite"}
        assert list(found) == [name for name in PARAMETERS if name != "final_norm"]
    assert not any(p._backward_hooks for p in one.model.parameters())


def test_a_diagnosis_is_of_the_tokens_and_their_targets() -> None:
    one = a_step()
    tokens, targets = RandomTokens(MODEL.vocab_size, CONFIG).batch(0)
    found = diagnose(one, tokens, targets, 9)
    loss = TinyLlama(MODEL).loss(tokens, targets).item()
    assert found.step == 9
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert loss != pytest.approx(TinyLlama(MODEL).loss(targets, tokens).item(), rel=1e-6)


# -- data and curves ---------------------------------------------------------------------------


def test_data_have_the_documented_limits(tmp_path: Any) -> None:
    assert (data.MOST_FILES, data.MOST_BYTES) == (100_000, 4 * 2**30)
    for name, content in (("a/b", b"one"), ("a/c", b"two"), ("a/.d", b"x"), ("z", b"last")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a/zero").write_bytes(b"a\0b")
    text = TextBytes(tmp_path, 256, TrainConfig(batch_size=1, seq_len=3))
    assert bytes(text.bytes) == b"onetwolast"
    assert (text.files_taken, text.files_left_out) == (3, 2)
    description = text.describe()
    assert (description["kind"], description["bytes"]) == ("text", 10)


def test_a_batch_has_all_micro_batches_of_its_rank() -> None:
    config = TrainConfig(batch_size=2, accumulate=3, seq_len=5, seed=4)
    whole = RandomTokens(50, config).batch(2)[0]
    assert whole.shape == (6, 5)
    parts = [RandomTokens(50, config).batch(2, Ranks(rank, 2))[0] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_picture_has_its_size_and_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
    from matplotlib.figure import Figure

    told: list[Any] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **how: told.append((figure, path, how))
    )
    result: Any = SimpleNamespace(
        start=3,
        losses=[2.0, 1.5],
        tier="v3",
        train=TrainConfig(precision="bf16"),
        model=ModelConfig(vocab_size=20),
    )
    curve._picture("path", "png", result)  # type: ignore[arg-type]
    ((figure, path, how),) = told
    assert (path, how) == ("path", {"format": "png", "dpi": 150})
    assert tuple(figure.get_size_inches()) == (8, 4.5)
    (axes,) = figure.axes
    losses, chance = axes.lines
    assert [tuple(point) for point in losses.get_xydata()] == [(4, 2.0), (5, 1.5)]
    assert list(chance.get_ydata()) == [math.log(20)] * 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "v3, bf16",
        "every token equally probable",
    ]


def test_the_parameters_of_a_run_are_drawn_from_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mock(side_effect=KeyError("no model"))
    monkeypatch.setattr(train, "TinyLlama", model)
    with pytest.raises(KeyError, match="no model"):
        run(seed=7)
    assert model.call_args.kwargs == {"seed": 7}
