"""Which configuration a search keeps, and how its table is put together."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.kernels.configs import Config
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
