"""Parts of training, each by itself: what is compiled, how a run ends, and what a curve shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from correctness_tests.support.runs import CONFIG, MODEL, PARAMETERS, run
from correctness_tests.support.two_ranks import SHAPE
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training import compiled, curve, data, step, train
from tinyllama.training.compiled import _ByParts
from tinyllama.training.data import RandomTokens, TextBytes
from tinyllama.training.diagnose import Diagnosis, Observed, Statistics, diagnose, gradients
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.step import TrainStep

TWO = Ranks(0, 2)
FINE, SICK = Statistics(0.0, 1.0, 0.5, 0.0), Statistics(None, None, None, 1.0)


# -- compiled by parts -------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled, in order; compiled it notes that it was called."""
    found: list[Any] = []

    def compile_(function: Any) -> Any:
        def noted(*args: Any, **params: Any) -> Any:
            import torch._dynamo.config as dynamo

            found.append(("called", function, dynamo.optimize_ddp))
            return function(*args, **params)

        found.append(function)
        return noted

    monkeypatch.setattr(compiled, "_compile", compile_)
    return found


def test_one_rank_compiles_one_graph(made: list[Any]) -> None:
    model = TinyLlama(SHAPE)
    compiled.compiled(model, ALONE)
    assert made == [model.loss_with]


def test_several_ranks_compile_block_norm_and_loss(made: list[Any]) -> None:
    model = TinyLlama(SHAPE)
    layers: list[Any] = list(model.layers)
    plain = (layers[0].compute, model.norm, model.loss_of)
    loss_of = compiled.compiled(model, TWO)
    assert isinstance(loss_of, _ByParts)
    assert made == list(plain)
    made.clear()
    tokens = torch.arange(8).view(2, 4)
    expected = model.loss(tokens, tokens)
    assert torch.equal(loss_of(tokens, tokens, model.rope(4)), expected)
    block, norm, loss = plain
    order = [block] * len(layers) + [norm, loss]
    assert made == [("called", function, False) for function in order]
    with pytest.raises(IndexError):
        loss_of(tokens + 100, tokens, model.rope(4))
    assert (model.norm, model.loss_of) == (norm, loss)
    assert all(layer.compute is block for layer in layers)


# -- what a step does --------------------------------------------------------------------------


def a_step(**settings: Any) -> TrainStep:
    plan = settings.pop("plan", None)
    return TrainStep(TinyLlama(MODEL), replace(CONFIG, **settings), plan)


def test_a_batch_that_does_not_fit_is_refused_by_its_own_shape() -> None:
    one = a_step()
    right, wrong = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    for tokens, targets in ((wrong, right), (right, wrong), (wrong, wrong)):
        with pytest.raises(ValueError, match="shape") as caught:
            one(tokens, targets)
        assert str(caught.value) == "a batch of shape (2, 9): this step takes (2, 8)"
    with pytest.raises(ValueError, match="shape") as caught:
        one(right)
    assert str(caught.value) == (
        "windows of shape (2, 8): this step takes (2, 9), or tokens and targets (2, 8)"
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_windows_are_tokens_and_their_successors(accumulate: int) -> None:
    config = replace(CONFIG, accumulate=accumulate)
    tokens, targets = RandomTokens(MODEL.vocab_size, config).batch(0)
    windows = torch.cat([tokens, targets[:, -1:]], 1)
    for given in (windows, windows.T.contiguous().T):
        one, other = a_step(accumulate=accumulate), a_step(accumulate=accumulate)
        assert one(given).item() == other(tokens, targets).item()
        assert torch.equal(torch.cat(list(one.tokens)), tokens)
        assert torch.equal(torch.cat(list(one.targets)), targets)


def test_phases_are_those_of_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_step(accumulate=3)
    names = [name for name, _ in one._phases()]
    assert names == ["forward", "backward"] * 3 + ["optimizer"]
    seconds = iter([float(n) for n in range(1, 100)])
    queue: Any = object()
    asked: list[Any] = []

    def wall(phase: Any, of: Any) -> float:
        asked.append(of)
        phase()
        return next(seconds)

    monkeypatch.setattr(step, "wall_seconds", wall)
    found = one.split(2, queue)
    # 1 + 3 + 5, then 8 + 10 + 12; 2 + 4 + 6, then 9 + 11 + 13; 7, then 14
    assert found == {"forward": 19.5, "backward": 22.5, "optimizer": 10.5}
    assert set(asked) == {queue}


def test_copies_of_weights_are_renewed_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight may have been changed by hand since the last step."""
    one = a_step()
    batch = RandomTokens(MODEL.vocab_size, CONFIG).batch(0)
    told: list[str] = []
    forward = one._forward

    def noted(part: int) -> None:
        told.append("forward")
        forward(part)

    monkeypatch.setattr(one, "_forward", noted)
    copies: Any = SimpleNamespace(refresh=lambda: told.append("renewed"), offered=nullcontext)
    one.rounded = copies
    calls: list[Any] = [
        lambda: one(*batch),
        lambda: one.probe(*batch),
        lambda: one.prepare(warm_up=1),
        lambda: one.split(1),
    ]
    for call in calls:
        told.clear()
        call()
        assert told[:2] == ["renewed", "forward"]
        assert told.count("renewed") == 1


@pytest.mark.parametrize("count", [1, 2])
def test_phases_of_one_rank_alone_are_captured_one_by_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several ranks begin beside one phase ends in the next."""
    one = a_step()
    one.plan, one.ranks = replace(one.plan, capture=True), Ranks(0, count)
    replayed: list[int] = []

    def capture(*graphs: Any) -> list[Any]:
        for functions in graphs:
            for function in functions:
                function()
        numbers = range(len(graphs))
        return [SimpleNamespace(replay=lambda n=n: replayed.append(n)) for n in numbers]

    monkeypatch.setattr(step, "capture_graphs", capture)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda numbers: numbers.mul_(2))
    found = one.split(2)
    assert list(found) == ["forward", "backward", "optimizer"]
    assert replayed == ([0, 1, 2] * 2 if count == 1 else [])


def test_preparation_warms_up_as_often_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_step()
    runs: list[int] = []

    def change() -> None:
        runs.append(1)
        with torch.no_grad():
            for tensor in (*one.optimizer.parameters, *one.optimizer.tensors().values()):
                tensor.add_(1)

    monkeypatch.setattr(one, "_run", change)
    tensors = [*one.optimizer.parameters, *one.optimizer.tensors().values()]
    kept = [tensor.detach().clone() for tensor in tensors]
    given: Any
    for given, count in (({}, 3), ({"warm_up": 1}, 1), ({"warm_up": 0}, 0)):
        runs.clear()
        one.prepare(**given)
        assert len(runs) == count
        assert all(map(torch.equal, kept, tensors))
    one.plan = replace(one.plan, capture=True)
    captured: list[Any] = []

    def capture(phases: Any) -> list[int]:
        captured.append(len(phases))
        return [1]

    monkeypatch.setattr(step, "capture_graphs", capture)
    monkeypatch.setattr(type(one._reduction), "warm_up", 11)
    for given, warm, graphs in (
        ({}, 11, 1),
        ({"warm_up": 12}, 12, 1),
        ({"capture": False}, 11, 0),
    ):
        runs.clear()
        captured.clear()
        one.prepare(**given)
        assert (len(runs), len(captured)) == (warm, graphs)
    one.prepare(warm_up=0)
    assert len(runs) == 11
    assert captured == [3]


@pytest.mark.parametrize(
    ("precision", "products"), [("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")]
)
def test_products_have_the_precision_that_is_asked_for(
    precision: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "cannot", lambda capability, device: None)
    with step.products(precision, torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == products
    monkeypatch.setattr(step, "cannot", lambda capability, device: f"no {capability}")
    with (
        pytest.raises(step.ConfigError) as caught,
        step.products(precision, torch.device("cpu")),
    ):
        pass
    assert str(caught.value) == (
        f"precision {precision} is not there on cpu: no {precision}; use fp32 or bf16"
    )


# -- how a run goes on and ends ----------------------------------------------------------------


def test_a_run_saves_after_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    saved: list[Any] = []

    def save(path: Any, one: Any, steps: int, batches: Any, *, interrupted: bool) -> None:
        saved.append((path, steps, batches, interrupted))

    monkeypatch.setattr(train, "save", save)
    for every, steps in ((2, [2, 3]), (3, [3, 3]), (None, [3])):
        saved.clear()
        run(num_steps=3, save_to=tmp_path / "a", save_every=every)
        kind = {"kind": "random tokens"}
        assert saved == [(tmp_path / "a", number, kind, False) for number in steps]
    saved.clear()
    run(num_steps=1, save_every=1)
    assert saved == []


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


class Told(Ranks):
    """Two ranks, of which the second one says what it is told to."""

    def gathered(self, mine: Any) -> list[Any]:
        return [mine, "there"]


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
            Told(0, 2),
            "",
            (),
            "wrong: the first op whose output is not finite is one on rank 0",
        ),
        ((FINE, FINE), Told(0, 2), "", (), "wrong: there on rank 1"),
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
    asked: list[Any] = []

    def diagnosed(*given: Any) -> Diagnosis:
        asked.append(given)
        return found

    monkeypatch.setattr(train, "diagnose", diagnosed)
    monkeypatch.setattr(train, "WATCHDOG", SimpleNamespace(fault=lambda device: fault))
    made = a_run(ranks=ranks)
    made.diagnose_at = at
    made._explain("wrong", (1, 2), 2)
    assert (made.result.status, made.result.reason) == ("failed", reason)
    assert asked == ([] if fault else [(made.step, 1, 2, 6)])
    assert made.result.diagnoses == ([found] if at == (5,) else []), "2 was diagnosed before"


def test_a_run_that_two_signals_could_end_is_marked() -> None:
    made = a_run()
    made._fail("why")
    assert (made.result.status, made.result.reason) == ("failed", "why")
    assert made.done == 5


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


def test_statistics_of_scaled_values() -> None:
    values = torch.tensor([2.0, -6.0, math.inf, 4.0])
    std: Any = pytest.approx(math.sqrt((1**2 + 3**2 + 2**2) / 3))
    assert Statistics.of(values, 2.0) == Statistics(-3.0, 2.0, std, 0.25)


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


def test_a_plan_without_capture_is_eager() -> None:
    assert str(a_step(plan=StepPlan()).plan) == "eager"
