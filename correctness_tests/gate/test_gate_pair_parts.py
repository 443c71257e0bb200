"""What a pair asks of its two processes, with stand-ins for both."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from correctness_tests.support.gate_fakes import REGISTERED, SIDES
from tinyllama.harness.gate import pair as module
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Effort, Pair, Taken, Tree
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.machine.worker import KEEPS_FREED_MEMORY, caches_in

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ONE = Benchmark("one", None, "m", {DEVICE: 0.1, HOST: 0.2})


class Unstarted(Pair):
    """A pair whose processes are Mocks; what they are asked is noted, without the time limit."""

    def __init__(self, root: Path, device: torch.device = CPU, own: Any = None) -> None:
        trees = [Tree(side, root / side, "python", side, root / f"{side}-caches") for side in SIDES]
        self.asked: list[tuple[Any, ...]] = []
        self.limits: set[float] = set()
        self.answers: dict[str, Callable[..., Any]] = {}
        super().__init__(trees, device, replace(REGISTERED, own=own), ["more"])

    def ask(self, name: str, method: str, *args: Any, timeout: float = module.TURN) -> Any:
        self.asked.append((name, method, *args))
        self.limits.add(timeout)
        return self.answers.get(method, lambda *given: None)(name, *args)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Mock:
    started = Mock(side_effect=lambda *given, **more: Mock(worked=Mock(return_value=1.0)))
    monkeypatch.setattr(module, "Worker", started)
    return started


@pytest.mark.parametrize(
    ("device", "processors", "threads"),
    [(CPU, 64, "1"), (GPU, 64, "8"), (GPU, 24, "3"), (GPU, 4, "1")],
)
@pytest.mark.parametrize("given", ["", "elsewhere"])
@pytest.mark.parametrize("own", [None, "own"])
def test_how_a_process_of_a_side_is_started(
    device: torch.device,
    processors: int,
    threads: str,
    given: str,
    own: Any,
    workers: Mock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(processors))}.__getitem__)
    monkeypatch.setattr(module, "roots", lambda root: [root / "src", root])
    monkeypatch.setattr(module.random, "randrange", lambda most: most)
    monkeypatch.setenv("PYTHONPATH", given)
    Unstarted(tmp_path, device, own)
    for side, started in zip(SIDES, workers.call_args_list, strict=True):
        env = caches_in(tmp_path / f"{side}-caches") | KEEPS_FREED_MEMORY
        env |= {"PYTHONHASHSEED": str(2**32), "PYTHONDONTWRITEBYTECODE": "1"}
        env["OMP_NUM_THREADS"] = threads
        if own:
            paths = [f"{tmp_path}/{side}/src", f"{tmp_path}/{side}", *([given] if given else [])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        late = "torch.fx.experimental.symbolic_shapes"
        preload = ("tinyllama.harness.gate.side", REGISTERED.package, late, "more")
        how = {"python": "python", "cwd": tmp_path / side, "preload": preload, "env": env}
        assert started == call(side, **how)


@pytest.mark.usefixtures("workers")
def test_what_is_compiled_apart_is_merged(tmp_path: Path) -> None:
    pair = Unstarted(tmp_path)
    before = list(pair.trees.values())
    pair.compile_apart("2")
    folders = {side: tmp_path / f"{side}-caches-2" for side in SIDES}
    assert sorted(pair.asked) == [(side, "use_caches", str(folders[side])) for side in SIDES]
    (folders[CANDIDATE] / "deep").mkdir(parents=True)
    (folders[CANDIDATE] / "deep/one").touch()
    (tmp_path / f"{CANDIDATE}-caches").mkdir()
    pair.merge_caches(before)
    assert (tmp_path / f"{CANDIDATE}-caches/deep/one").exists()
    assert (folders[CANDIDATE] / "deep/one").exists()
    assert not (tmp_path / f"{BASE}-caches").exists()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("seconds", "around", "calls"),
    [
        (0.01, 0.0, [2, 25]),
        (0.5, 0.0, [2, 8]),  # so many at least, however long they take
        (0.025, 0.0, [2, 10]),
        (1e-4, 0.1, [2, 8, 20, 50, 120, 268]),  # asking takes longer; that is all of the tries
    ],
)
def test_calls_are_paced_until_they_are_long_enough(
    seconds: float,
    around: float,
    calls: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, now = Unstarted(tmp_path), [0.0]

    def paced(side: str, name: str, count: int) -> float:
        now[0] += count * seconds + around
        return count * seconds + around

    pair.answers["paced"] = paced
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    pace = pair.pace(CANDIDATE, ONE)
    assert pace == pytest.approx(seconds + around / calls[-1])
    expected = [((CANDIDATE, "ready", "one"), (CANDIDATE, "paced", "one", n)) for n in calls]
    assert pair.asked == [one for two in expected for one in two]
    assert pair.limits == {module.READY, module.TURN}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("said", "right"), [(0.2, True), (0.12, True), (0.1199, False), (9.0, True), (None, False)]
)
def test_a_clock_may_say_a_little_less_than_passed(
    said: Any, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, now = Unstarted(tmp_path), [0.0]

    def paced(side: str, name: str, count: int) -> Any:
        now[0] += 0.1 * count
        return said if said is None else said * count / 2

    pair.answers["paced"] = paced
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "PACES", 1)
    wrong = pytest.raises(ValueError, match=r"that 2 calls took .*, and 0.2 s passed: its clock")
    with nullcontext() if right else wrong:
        pair.pace(BASE, ONE)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("took", "pairs", "done"), [(0.01, 12, 12), (1.0, 12, 8), (0.24, 12, 10), (1.0, 6, 6)]
)
def test_long_turns_are_fewer_but_some(
    took: float, pairs: int, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An even number of pairs, at least eight, in two seconds."""
    pair, now = Unstarted(tmp_path), [100.0]

    def turn(side: str, name: str, seed: int) -> dict[str, float]:
        now[0] += took / 2
        return {DEVICE: 1e-3, HOST: 2e-3}  # and the judge's clock says nothing

    pair.answers["turn"] = turn
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    seeds = iter(range(100))
    monkeypatch.setattr(module.turns, "new_seed", lambda: next(seeds))
    taken = pair.take(ONE, pairs, {})
    assert taken.seeds == list(range(1, 1 + done)), "0 is of the turns that do not count"
    assert {side: len(each) for side, each in taken.took.items()} == dict.fromkeys(SIDES, done)
    of = [(side, seed) for side, _, _, seed in pair.asked]
    assert of[:6] == [
        (CANDIDATE, 0),
        (BASE, 0),
        (BASE, 1),
        (CANDIDATE, 1),
        (CANDIDATE, 2),
        (BASE, 2),
    ]
    assert "turns" in pair.seconds


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("factory", ["", "module:Step"])
@pytest.mark.parametrize("alike", [True, False])
def test_of_an_op_chosen_calls_are_compared_and_of_a_step_none(
    factory: str, alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Unstarted(tmp_path)
    pair.answers["notes"] = lambda side, name, seeds: [side, *seeds]
    chosen = Mock(return_value=[(0, 1, 3, False), (1, 0, 4, True)])
    made = Mock(return_value="block")
    monkeypatch.setattr(module, "turns", SimpleNamespace(held=chosen, block=made))
    taken = Taken([7, 8], {BASE: ["b"], CANDIDATE: ["c"]})  # type: ignore[list-item]
    found: Any = pair.compared(replace(ONE, factory=factory), taken, alike=alike)
    assert found == "block"
    made.assert_called_once_with(["b"], ["c"], ONE.slowdowns)
    ends = [(side, "end", "one") for side in SIDES]
    assert sorted(pair.asked[-2:]) == ends
    if factory:
        assert len(pair.asked) == 2
        assert pair.seconds == Stages()
        return
    chosen.assert_called_once_with([BASE, 7, 8], [CANDIDATE, 7, 8], alike)
    held = [(BASE, "hold", "one", 8, 3, False), (CANDIDATE, "hold", "one", 7, 4, True)]
    assert pair.asked[2:4] == held
    assert "compare" in pair.seconds


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("factory", ["", "module:Step"])
def test_what_the_candidate_alone_has_is_timed_alone(
    factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Unstarted(tmp_path)
    seconds = iter([99.0, 3.0, 1.0, 2.0])
    pair.answers["turn"] = lambda *given: {DEVICE: (one := next(seconds)), HOST: 10 * one}
    pair.answers["counted"] = lambda *given: {"kernels": 3}
    pair.answers["verify"] = lambda *given: "proofs"
    pair.answers["layouts"] = lambda *given: {"padded": 1.5}
    seeds = iter(range(100))
    monkeypatch.setattr(module.turns, "new_seed", lambda: next(seeds))
    benchmark = replace(ONE, factory=factory, layouts={"padded": 2.0})
    found: Any = pair.alone(benchmark, Effort(pairs=1, repeated=3, first=0.7))
    assert found == ({DEVICE: 2.0, HOST: 20.0}, {"kernels": 3}, {"padded": 1.5})
    held = [] if factory else [("hold", "one", 3, 0, True)]
    assert [tuple(rest) for side, *rest in pair.asked] == [
        *(
            ("begin", "one"),
            ("counted", "one"),
            ("verify", "one"),
            ("expect", "one", "proofs", 0.7),
        ),
        *[("turn", "one", seed) for seed in range(4)],
        *held,
        *(("layouts", "one", ("padded",)), ("end", "one")),
    ]
    assert {side for side, *_ in pair.asked} == {CANDIDATE}


@pytest.mark.usefixtures("workers")
def test_layouts_are_asked_for_where_there_are_some(tmp_path: Path) -> None:
    pair = Unstarted(tmp_path)
    benchmark = replace(ONE, layouts={"padded": 2.0, "offset": 3.0})
    assert pair.layouts(ONE) == pair.layouts(benchmark, BASE, []) == {}
    assert pair.asked == []
    pair.layouts(benchmark)
    pair.layouts(benchmark, BASE, ["offset"])
    assert pair.asked == [
        (CANDIDATE, "layouts", "one", ("padded", "offset")),
        (BASE, "layouts", "one", ("offset",)),
    ]


@pytest.mark.usefixtures("workers")
def test_both_sides_expect_their_own_proofs(tmp_path: Path) -> None:
    pair = Unstarted(tmp_path)
    pair.make_ready(ONE, {BASE: "b", CANDIDATE: "c"}, 0.3)
    assert sorted(pair.asked[:2]) == [(side, "begin", "one") for side in SIDES]
    expected = [(BASE, "expect", "one", "b", 0.3), (CANDIDATE, "expect", "one", "c", 0.3)]
    assert sorted(pair.asked[2:]) == expected
    assert pair.limits == {module.READY}
