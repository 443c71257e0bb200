"""What is prepared, in which order and by how many; and the values of a turn's calls."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from tinyllama.harness.correct.evaluate import Inputs
from tinyllama.harness.gate import preparing, proven, waves
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.proven import FACTORS, WIDTH, Proven
from tinyllama.harness.gate.setting import BenchmarkState
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.measure.op_contender import Timed


def state(name: str, timed: Any = None, **fields: Any) -> BenchmarkState:
    return BenchmarkState(Benchmark(name, timed, "m", {}, **fields))


def test_what_takes_longest_is_prepared_first_and_cases_of_a_provider_together() -> None:
    """Steps, then what has kernels, of these what has most files, then most cases."""
    files = {"a": 5, "b": 3, "c": 9, "d": 5, "step": 1, "other": 2}
    laid_out = {"layouts": {"padded": 2.0}}
    every = [
        state("d0", Timed("d", "eager", 0, "fp32")),
        state("a0", Timed("a", "eager", 0, "fp32")),
        state("b0", Timed("b", "triton", 0, "fp32")),
        state("a1", Timed("a", "eager", 1, "fp32")),
        state("c0", Timed("c", "triton", 0, "fp32"), **laid_out),
        state("b1", Timed("b", "triton", 1, "fp32"), **laid_out),
        state("step", Timed("a", "eager", 0, "fp32"), factory="m:Step"),
        state("other", "no op's"),
    ]
    count = {one.name: files[one.name.rstrip("01")] for one in every}
    found = preparing._groups(every, lambda benchmark: count[benchmark.name])
    names = [[one.name for one in group] for group in found]
    assert names == [["step"], ["c0"], ["b0", "b1"], ["a0", "a1"], ["d0"], ["other"]]


@pytest.mark.parametrize(
    ("own", "alike", "flag", "first"),
    [
        ("ab", "xye", "", "ab"),
        ("ab", "xy", "", "ab"),
        ("a", "xy", "", "a"),
        ("e", "xy", "", "e"),
        ("abc", "xye", "", ""),  # more than half
        ("abc", "xy", "", ""),
        ("ab", "xy", "all_verdicts", ""),
        ("ab", "xy", "measure_all", ""),
        ("ab", "xy", "toolchains", ""),
    ],
)
def test_what_differs_in_its_own_files_is_first_if_it_is_little(
    own: str, alike: str, flag: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [SimpleNamespace(name=name) for name in "xyabcde"]
    flags = {name: name == flag for name in ("all_verdicts", "measure_all", "toolchains")}
    run: Any = SimpleNamespace(undecided=lambda: every, setting=SimpleNamespace(**flags))

    def same(run: Any, one: Any, *, whole: bool) -> bool:
        assert whole
        return one.name in alike

    monkeypatch.setattr(preparing, "_alike", same)
    monkeypatch.setattr(preparing, "_own_differs", lambda run, one: one.name in own)
    assert [one.name for one in preparing.nearest(run)] == list(first)


@pytest.mark.parametrize("moved", [BASE, CANDIDATE])
def test_a_file_that_one_side_alone_has_is_the_ops_own(
    moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that was a file becomes a folder, or a folder a file."""
    files = {
        side: "ops/a/__init__.py" if side == moved else "ops/a.py" for side in (BASE, CANDIDATE)
    }
    trees = [SimpleNamespace(name=side, root=tmp_path / side) for side in (BASE, CANDIDATE)]
    setting = SimpleNamespace(sources=lambda tree, benchmark: [{files[tree.name]: "1"}, {}])
    monkeypatch.setattr(
        preparing,
        "module_file",
        lambda root, module: root / files[root.name] if root.name == moved else None,
    )
    run: Any = SimpleNamespace(trees=trees, setting=setting)
    assert preparing._own_differs(run, state("a"))


@pytest.mark.parametrize("flag", ["", "measure_all", "toolchains"])
@pytest.mark.parametrize("differs", [True, False])
def test_a_further_case_is_compared_where_an_own_file_differs(
    flag: str, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {name: name == flag for name in ("measure_all", "toolchains")}
    run: Any = SimpleNamespace(setting=SimpleNamespace(**flags))
    monkeypatch.setattr(preparing, "_own_differs", lambda run, one: differs)
    assert preparing._is_compared(run, state("a"))
    assert preparing._is_compared(run, state("a", further=True)) is (differs and not flag)


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({}, False),
        ({"ops/a/kernels.py": "2"}, True),
        ({"ops/a/new.py": "2"}, True),
        ({"ops/b.py": "2"}, False),
        ({"ops/another.py": "2"}, False),
    ],
)
@pytest.mark.parametrize("where", ["ops/a/__init__.py", None])
def test_own_files_are_those_beside_the_one_of_the_op(
    changed: dict[str, str],
    differs: bool,
    where: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = {"ops/a/kernels.py": "1", "ops/b.py": "1"}
    trees = [SimpleNamespace(name=side, root=tmp_path / side) for side in (BASE, CANDIDATE)]
    sources = {BASE: base, CANDIDATE: {**base, **changed}}
    setting = SimpleNamespace(sources=lambda tree, benchmark: [sources[tree.name], {}])
    monkeypatch.setattr(preparing, "module_file", lambda root, module: where and root / where)
    for order in (trees, trees[::-1]):
        run: Any = SimpleNamespace(trees=order, setting=setting)
        assert preparing._own_differs(run, state("a")) is (differs and where is not None)


@pytest.mark.parametrize(
    ("at_once", "groups", "more"), [(1, 9, 0), (4, 9, 4), (4, 3, 2), (4, 1, 0), (4, 0, 0)]
)
def test_pairs_beside_the_first_compile_apart_and_are_merged(
    at_once: int, groups: int, more: int
) -> None:
    pair, others = Mock(), [Mock() for _ in range(more)]
    pairs = Mock(return_value=nullcontext(others))
    run: Any = SimpleNamespace(setting=SimpleNamespace(at_once=at_once), pairs=pairs, trees="trees")
    with preparing._beside(run, pair, groups) as found:
        assert found == [pair, *others]
    assert pairs.mock_calls[:1] == ([call(more)] if more else [])
    for number, other in enumerate(others):
        assert other.mock_calls == [call.compile_apart(str(number)), call.merge_caches("trees")]


# -- the values of a turn's calls -----------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "asked"), [("a", "aa"), ("ab", "ab")])
def test_an_error_of_any_pair_that_prepares_is_raised(
    pairs: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first one prepares what found no memory beside the others."""
    prepared: list[Any] = []

    def prepare_some(run: Any, pair: Any, waiting: Any, observed: Any, again: Any) -> None:
        prepared.append(pair)
        if pair == "b":
            raise KeyError("a bug")

    monkeypatch.setattr(preparing, "_prepare_some", prepare_some)
    monkeypatch.setattr(preparing, "_beside", lambda *of: nullcontext(list(pairs)))
    run: Any = SimpleNamespace(setting=SimpleNamespace(ahead=nullcontext))
    a: Any = "a"
    with pytest.raises(KeyError, match="a bug") if "b" in pairs else nullcontext():
        preparing._prepare_all(run, a, [], Mock())
    assert sorted(prepared) == list(asked)


def test_pairs_start_ahead_once_one_has_nothing_more_to_prepare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    is_ahead = threading.Event()

    def prepare_some(run: Any, pair: Any, waiting: Any, observed: Any, again: Any) -> None:
        if pair == "b":
            is_ahead.wait(10)
        else:
            time.sleep(0.05)
        done.append(pair)

    @contextmanager
    def ahead() -> Iterator[None]:
        done.append("ahead")
        is_ahead.set()
        yield

    monkeypatch.setattr(preparing, "_prepare_some", prepare_some)
    monkeypatch.setattr(preparing, "_beside", lambda *of: nullcontext(["b", "a"]))
    last: Any = "alone"
    run: Any = SimpleNamespace(setting=SimpleNamespace(ahead=ahead))
    preparing._prepare_all(run, last, [], Mock())
    assert done == ["a", "ahead", "b", "alone"]


def test_what_runs_nothing_that_differs_is_settled_and_not_prepared() -> None:
    settle, pair = Mock(), Mock()
    run: Any = SimpleNamespace(settle=settle)
    some = [state("a"), state("b")]
    observed = preparing.Observed(preparing.Differs({}, {}))
    preparing._prepare_some(run, pair, iter([some[:1], some[1:]]), observed, None)
    outcome = preparing.Outcome.IDENTICAL
    assert settle.call_args_list == [call(one, outcome, preparing._APART) for one in some]
    assert not pair.method_calls


def of_turns(master: Inputs) -> Proven:
    made: Any = object.__new__(Proven)
    made.device, made.round, made._master = torch.device("cpu"), 7, lambda: master
    return made


@pytest.mark.parametrize("width", [1, 3, FACTORS, FACTORS + 5, 2 * FACTORS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_feature_has_a_factor_near_one(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    numbers = 1 + WIDTH * (torch.rand(FACTORS, generator=generator) - 0.5)
    factors = torch.cat([numbers] * 3)[:width].to(dtype)
    x = torch.linspace(1, 2, 2 * width).to(dtype).view(2, width)
    row = torch.arange(1.0, 1 + width).to(dtype)
    expanded = row.expand(3, width)
    at, one = torch.arange(4), torch.tensor(5.0)
    master = Inputs({"x": x, "several": [row, at]}, {"y": expanded, "z": None}, {"eps": one})
    into = Inputs(
        {"x": torch.zeros_like(x), "several": [torch.zeros_like(row), torch.zeros_like(at)]},
        {"y": torch.zeros(width, dtype=dtype).expand(3, width), "z": None},
        {"eps": one},
    )
    found = of_turns(master)._varied(into)
    assert found is into
    assert torch.equal(found.args["x"], x * factors)
    several: Any = found.args["several"]
    assert torch.equal(several[0], row * factors if width > 1 else row)
    assert torch.equal(several[1], at)
    assert torch.equal(found.upstream["y"], expanded)  # type: ignore[arg-type]
    assert 0.9 < float(factors.min()) <= float(factors.max()) < 1.1


def test_a_larger_result_may_be_further_off_in_proportion() -> None:
    made: Any = object.__new__(Proven)
    results = {"y": torch.tensor([3.0, 4.0]), "z": torch.zeros(2)}
    made.expected = {0: proven._Expected(results, {"y": 0.1, "z": 0.2})}
    assert made._limits() == {"y": 0.1, "z": 0.2}
    plain = {"y": torch.tensor([30.0, 40.0]), "z": torch.ones(2)}
    assert made._limits(plain) == {"y": pytest.approx(1.0), "z": 0.2}
    small = {name: value / 100 for name, value in plain.items()}
    assert made._limits(small) == {"y": 0.1, "z": 0.2}


def test_calls_of_a_turn_are_those_of_its_seed() -> None:
    made: Any = object.__new__(Proven)
    made.case = "a case"
    made.noted = {one: SimpleNamespace(digest=one % 5 or None) for one in (95, 81, 80, 96, 64, 79)}
    assert made._calls_of(4) == [80, 81, 95]
    assert made._calls_of(3) == [64, 79]
    made.exact = True
    assert made.notes(4) == [1], "where there is a digest"
    made.exact = False
    assert made.notes(4) == []
    with pytest.raises(ValueError, match="a case: no turn had the seed 9"):
        made._calls_of(9)


def test_values_of_a_turn_are_left_at_its_end() -> None:
    made: Any = object.__new__(Proven)
    made.round, made.values, made.place = 1, None, proven.SINGLE
    with suppress(KeyError), made._values_of(4, 3):
        assert (made.values, made.place) == (80, 3)
        made.round = 9
        raise KeyError
    assert (made.round, made.values, made.place) == (1, None, proven.SINGLE)
    with made._values_of(0):
        assert (made.values, made.place) == (16, 15)


@pytest.mark.parametrize("name", ["y", "z", "grad x"])
@pytest.mark.parametrize("draw", range(3))
def test_one_result_with_other_bits_makes_both_sides_differ(name: str, draw: int) -> None:
    """Each result on the inputs of each seed counts, the last as well as the first."""

    def proofs() -> list[dict[str, Any]]:
        names = ("y", "z", "grad x")
        return [{one: SimpleNamespace(digest=f"{one}{of}") for one in names} for of in range(3)]

    one = state("a")
    one.proofs.update({BASE: proofs(), CANDIDATE: proofs()})
    assert waves._same_bits(one)
    one.proofs[CANDIDATE][draw][name].digest = "other"
    assert not waves._same_bits(one)


def test_of_a_step_no_bits_are_compared() -> None:
    one = state("a", factory="m:Step")
    one.proofs.update({BASE: [], CANDIDATE: []})
    assert not waves._same_bits(one)
