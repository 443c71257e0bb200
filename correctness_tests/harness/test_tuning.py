"""Which configuration a search keeps, and how its table is put together."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.cli import main
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.kernels import launch
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.machine import device
from tinyllama.harness.measure import tuning
from tinyllama.harness.measure.tuning import MARGIN, SURVIVORS, Search, merged, search
from tinyllama.ops import OPS

OLD, NEW, OTHER = (Config(BLOCK=block, num_warps=4) for block in (64, 128, 256))
WITHIN, BEYOND = 1 - MARGIN / 2, 1 - 2 * MARGIN


def found(seconds: dict[Config, float], spilled: dict[Config, int] | None = None) -> Search:
    return Search("space", {"D": 64}, OLD, seconds, spilled or {})


@pytest.mark.parametrize(
    ("seconds", "spilled", "best"),
    [
        ({OLD: 1.0, NEW: WITHIN}, {}, OLD),
        ({OLD: 1.0, NEW: BEYOND}, {}, NEW),
        ({OLD: 1.0, NEW: WITHIN}, {OLD: 14, NEW: 0}, NEW),
        ({OLD: 1.0, NEW: 1 / WITHIN}, {OLD: 14, NEW: 0}, NEW),
        ({OLD: 1.0, NEW: 1 / BEYOND}, {OLD: 14, NEW: 0}, OLD),
        ({OLD: 1.0, NEW: BEYOND}, {OLD: 0, NEW: 14}, NEW),
        ({NEW: 1.0, OTHER: 1.001}, {}, NEW),
        ({}, {}, OLD),
    ],
    ids=[
        "noise changes nothing",
        "the faster one",
        "as fast, and spills less",
        "hardly slower, and spills less",
        "slower, whatever it spills",
        "faster, whatever it spills",
        "the one in force fails",
        "all fail",
    ],
)
def test_the_configuration_that_is_kept(
    seconds: dict[Config, float], spilled: dict[Config, int], best: Config
) -> None:
    assert found(seconds, spilled).best == best


def test_the_gain_is_over_the_one_in_force() -> None:
    assert found({OLD: 3.0, NEW: 2.0}).gain == 1.5
    assert found({NEW: 2.0}).gain == 1.0


def test_a_table_keeps_what_was_not_searched() -> None:
    before = {"another": {"": OLD.kwargs()}, "space": {"D=32": OLD.kwargs()}}
    table = merged(before, [found({OLD: 2.0, NEW: 1.0})])
    assert table == {**before, "space": {"D=32": OLD.kwargs(), "D=64": NEW.kwargs()}}


def test_the_one_in_force_is_timed_in_full_however_slow_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nothing would be gained over it, and what is kept need not beat it."""
    others = [Config(BLOCK=2**power, num_warps=8) for power in range(SURVIVORS + 2)]
    seconds = {OLD: 1.0, **{one: 0.5 + i / 100 for i, one in enumerate(others)}}
    space: Any = SimpleNamespace(
        configs=lambda **key: others, force=lambda *a, **k: contextlib.nullcontext()
    )
    case = SimpleNamespace(op=None, provider=SimpleNamespace(call=None))
    subject: Any = SimpleNamespace(case=case, inputs=None, results={})
    monkeypatch.setattr(tuning, "evaluate", lambda *args: {})
    monkeypatch.setattr(tuning, "launched", lambda: contextlib.nullcontext([]))
    monkeypatch.setattr(tuning, "_timed", lambda _, key, config, *rest: lambda: seconds[config])
    one = found({})
    tuning._search(space, one, subject)
    assert set(one.spilled) == {OLD, *others}, "all are tried"
    assert set(one.seconds) == {OLD, *others[:SURVIVORS]}
    assert one.best == others[0]
    assert one.gain == pytest.approx(2.0)


def test_spills_are_of_all_kernels_and_failures_are_told_in_one_short_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space: Any = SimpleNamespace(
        configs=lambda **key: [NEW], force=lambda *a, **k: contextlib.nullcontext()
    )
    kernels = [SimpleNamespace(kernel=SimpleNamespace(n_spills=n)) for n in (3, 4)]
    monkeypatch.setattr(tuning, "evaluate", lambda *args: {})
    monkeypatch.setattr(tuning, "launched", lambda: contextlib.nullcontext(kernels))

    def timed(space: Any, key: Any, config: Config, subject: Any) -> Any:
        if config == NEW:
            raise ValueError("x" * 200 + "\nmore")
        return lambda: 1.0

    monkeypatch.setattr(tuning, "_timed", timed)
    case = SimpleNamespace(op=None, provider=SimpleNamespace(call=None))
    subject: Any = SimpleNamespace(case=case, inputs=None, results={})
    one = found({})
    tuning._search(space, one, subject)
    assert one.spilled == {OLD: 7, NEW: 7}
    assert one.failed == {NEW: "ValueError: " + "x" * 108}
    assert one.seconds == {OLD: 1.0}


@pytest.mark.parametrize(
    ("dtype", "precision", "unit"),
    [
        (torch.float32, "highest", 2.0**-23),
        (torch.float32, "high", 2.0**-10),
        (torch.bfloat16, "high", 2.0**-7),
        (torch.float16, "highest", 2.0**-10),
    ],
)
def test_results_may_differ_by_eight_units_of_what_they_are_computed_in(
    dtype: torch.dtype, precision: str, unit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    right = torch.ones(4, dtype=dtype)
    for units, passes in ((7, True), (8, True), (10, False)):
        off = {"y": right.double() * (1 + units * unit)}
        context = contextlib.nullcontext() if passes else pytest.raises(AssertionError)
        with context:
            tuning._assert_close(off, {"y": right})
    tuning._assert_close({"y": torch.zeros(4)}, {"y": torch.zeros(4)})


@pytest.mark.gpu
def test_a_search_times_each_configuration_and_counts_spills(
    own_gpu: None, gpu: torch.device
) -> None:
    op = OPS["transpose"]
    case = OpCase(op, op["triton"], op.timed[0], torch.float32)
    (one,) = search(case, gpu)
    assert one.space == "transpose"
    assert not one.failed
    assert one.best in one.seconds
    assert set(one.seconds) <= set(one.spilled)
    assert all(seconds > 0 for seconds in one.seconds.values())
    assert set(one.spilled.values()) == {0}


@pytest.mark.parametrize("wrong", ["first", "last"])
def test_a_configuration_with_any_wrong_result_is_not_trusted(wrong: str) -> None:
    right = {"first": torch.ones(3), "last": torch.ones(3)}
    tuning._assert_close(right, right)
    with pytest.raises(AssertionError, match=f"{wrong} differs by"):
        tuning._assert_close({**right, wrong: torch.ones(3) + 1}, right)


@pytest.mark.parametrize("times", [0.5, 2.0])
@pytest.mark.parametrize(
    ("precision", "dtype", "unit"),
    [
        ("highest", torch.float32, 2.0**-23),
        ("high", torch.float32, 2.0**-10),  # products in tf32
        ("high", torch.bfloat16, 2.0**-7),
        ("high", torch.float64, 2.0**-52),
        ("highest", torch.bfloat16, 2.0**-7),
    ],
)
def test_how_far_a_configuration_may_be_off_follows_from_its_precision(
    precision: str,
    dtype: torch.dtype,
    unit: float,
    times: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    right = torch.ones(16, dtype=dtype)
    off = {"y": right.double() * (1 + times * tuning.SIEVE * unit)}
    if times < 1:
        tuning._assert_close(off, {"y": right})
    else:
        with pytest.raises(AssertionError, match="y differs by"):
            tuning._assert_close(off, {"y": right})


@pytest.mark.parametrize(("off", "trusted"), [(0.0, True), (0.9e-30, True), (1.1e-30, False)])
def test_where_nothing_is_expected_next_to_nothing_may_come(off: float, trusted: bool) -> None:
    right = {"y": torch.zeros(1, dtype=torch.float64)}
    with contextlib.nullcontext() if trusted else pytest.raises(AssertionError, match="y differs"):
        tuning._assert_close({"y": right["y"] + off}, right)


class FakeSpace:
    """A space of two configurations, in which one is chosen until another is forced."""

    def __init__(self, name: str, order: list[Any]) -> None:
        self.name, self.order = name, order

    def choose(self, device: torch.device, **key: Any) -> Config:
        return OLD

    def configs(self, **key: Any) -> list[Config]:
        return [OLD, NEW]

    @contextlib.contextmanager
    def force(self, config: Config, **key: Any) -> Iterator[None]:
        self.order.append((self.name, config, key))
        yield


def test_each_key_that_a_case_asks_for_is_searched_and_its_choice_is_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: Any = {("one", "D=1"): {"D": 1}, ("one", "D=2"): {"D": 2}, ("two", "D=1"): {"D": 1}}
    spaces = {name: FakeSpace(name, []) for name in ("one", "two")}
    forced: dict[Any, Config] = {}
    subject = tuning._Subject(None, None, {}, keys)  # type: ignore[arg-type]

    def searched(space: Any, found: Search, given: Any) -> None:
        assert given is subject
        assert len(forced) == [*keys.values()].index(found.key) or space.name == "two"
        found.seconds = {OLD: 2.0, NEW: 1.0}

    monkeypatch.setattr(tuning._Subject, "of", lambda case, device: subject)
    monkeypatch.setattr(tuning, "SPACES", spaces)
    monkeypatch.setattr(tuning, "FORCED", forced)
    monkeypatch.setattr(tuning, "_search", searched)
    case: Any = None
    every = list(search(case, torch.device("cpu")))
    assert [(one.space, one.key, one.before) for one in every] == [
        (name, key, OLD) for (name, _), key in keys.items()
    ]
    assert forced == {key: NEW for key in keys}


def test_what_is_compiled_ahead_is_each_configuration_of_each_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In processes of their own, with the precision of this one."""
    order: list[Any] = []
    spaces = {name: FakeSpace(name, order) for name in ("one", "two")}
    keys: Any = {("one", "D=1"): {"D": 1}, ("two", ""): {}}
    made: list[Any] = []

    class Pool:
        def __init__(self, workers: int, context: Any) -> None:
            order.append((workers, context.get_start_method()))

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *error: object) -> None:
            order.append("all are done")

        def map(self, function: Any, tasks: list[Any]) -> Iterator[None]:
            made.extend(tasks)
            return map(function, tasks)

    op = OPS["transpose"]
    case = OpCase(op, op["triton"], op.timed[0], torch.float32)
    device = torch.device("cpu")
    asked: list[str] = []
    monkeypatch.setattr(tuning, "SPACES", spaces)
    monkeypatch.setattr(tuning, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)

    def of(given: OpCase, on: torch.device) -> Any:
        assert (str(given), on) == (str(case), device)
        order.append("made")
        if len(order) == 5:
            raise RuntimeError("does not compile")
        return tuning._Subject(given, None, {}, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(tuning._Subject, "of", of)
    tuning.compiled_ahead("tinyllama.ops", [case], device, 3)
    each = [
        *(("one", config, {"D": 1}) for config in (OLD, NEW)),
        *(("two", config, {}) for config in (OLD, NEW)),
    ]
    compiled = [part for one in each for part in (one, "made")]
    assert order == ["made", (3, "spawn"), *compiled, "all are done"]
    assert asked == ["medium"] * 4
    assert {(one.package, one.device, one.precision) for one in made} == {
        ("tinyllama.ops", device, "medium")
    }
    assert {one.timed for one in made} == {tuning.Timed.of(case)}


def test_a_reading_is_of_a_cold_pass_there_and_back_in_that_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[Any] = []

    def flush() -> None:
        order.append("flush")

    def read(call: Any, before: Any) -> Any:
        assert before is flush
        call()
        return SimpleNamespace(device=7.0, host=9.0)

    monkeypatch.setattr(tuning, "queue_of", str)
    monkeypatch.setattr(tuning, "flush_of", lambda device: flush)
    monkeypatch.setattr(tuning, "Clock", lambda queue: SimpleNamespace(read=read))
    x, weight = torch.ones(3), torch.ones(3)
    backward: list[torch.Tensor] = []

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        order.append(eps)
        weight.register_hook(backward.append)
        return x * weight

    for differentiable in (["weight"], []):
        op = SimpleNamespace(differentiable=differentiable)
        case = SimpleNamespace(op=op, provider=SimpleNamespace(call=call))
        args = {"x": x, "weight": weight}
        inputs = SimpleNamespace(args=args, params={"eps": 0.5}, upstream={"y": 2 * torch.ones(3)})
        subject: Any = SimpleNamespace(case=case, inputs=inputs)
        weight.requires_grad_()
        one = tuning._timed(FakeSpace("one", order), {"D": 1}, NEW, subject)  # type: ignore[arg-type]
        assert order == [], "nothing runs yet"
        assert one() == 7.0
        assert order == [("one", NEW, {"D": 1}), 0.5]
        assert [grad.tolist() for grad in backward] == [[2.0] * 3] * bool(differentiable)
        assert not x.requires_grad
        order.clear()
        backward.clear()


def test_a_search_adds_to_the_chips_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it did not search stays, and so does what it found first."""
    table, config = tmp_path / "sm_90.json", Config(num_warps=8, BLOCK=64)
    before = {"another": {"D=1": config.kwargs()}, "transpose": {"D=2": config.kwargs()}}
    table.write_text(json.dumps({"chip": "sm_90", "spaces": before}))
    each = [Search("transpose", {"D": d}, config, {config: 1.0}) for d in (3, 4)]
    monkeypatch.setattr(device, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(device, "device_name", lambda one: "a GPU")
    monkeypatch.setattr(launch, "chip_of", lambda one: "sm_90")
    monkeypatch.setattr(tuning, "compiled_ahead", lambda *given: None)
    monkeypatch.setattr(tuning, "search", lambda *given: iter(each))
    assert main(["tune", "--op", "transpose", "--output", str(tmp_path)]) == 0
    spaces = json.loads(table.read_text())["spaces"]
    assert {name: sorted(keys) for name, keys in spaces.items()} == {
        "another": ["D=1"],
        "transpose": ["D=2", "D=3", "D=4"],
    }
