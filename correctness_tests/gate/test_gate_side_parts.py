"""What a side does when it is asked, with stand-ins for its subjects and for a GPU."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from correctness_tests.support.contenders import FILES, PACKAGE
from tinyllama.harness.gate import side as module
from tinyllama.harness.gate.side import ON_CPU, Benchmark, Side, left_out
from tinyllama.harness.gate.subject import DEVICE
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def side() -> Side:
    return Side("cpu", PACKAGE, FILES)


# -- on a GPU that is not there -------------------------------------------------------------------


class Memory:
    """The memory of a GPU, as torch tells of it. at_most: in a check, above what is reserved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_most: int) -> None:
        self.seen: list[str] = []
        self.reserved = 100
        for name in ("empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *on, name=name: self.note(name, *on))
        monkeypatch.setattr(torch.cuda, "memory_reserved", self.told)
        monkeypatch.setattr(
            torch.cuda, "max_memory_reserved", lambda device: self.told(device) + at_most
        )

    def note(self, name: str, *on: torch.device) -> None:
        assert set(on) <= {GPU}
        self.seen.append(name)

    def told(self, device: torch.device) -> int:
        assert device == GPU
        return self.reserved


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_a_check_takes_of_a_device_is_noted_and_given_back(
    device: torch.device, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, at_most=37)

    def verify() -> str:
        memory.note("verify")
        return "proofs"

    side.device = device
    subject = SimpleNamespace(verify=verify, hold=lambda *given: memory.note(str(given)))
    side.subjects["a"] = subject
    assert side.most_bytes("a") == 0
    assert side.verify("a") == "proofs"
    on_gpu = device is GPU
    assert side.most_bytes("a") == (37 if on_gpu else 0)
    assert side.most_bytes("b") == 0
    around = ["empty_cache", "reset_peak_memory_stats", "verify", "empty_cache"]
    assert memory.seen == (around if on_gpu else ["verify"])
    memory.seen.clear()
    side.hold("a", 5, 6, True)
    side.end("a")
    side.end("a")
    assert memory.seen == ["(5, 6, True)", *["empty_cache"] * (3 if on_gpu else 0)]
    assert side.subjects == {}


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_the_products_whose_workspace_stays_are_those_of_both_kinds(
    device: torch.device, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []

    def ones(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == GPU
        return torch.zeros(shape, dtype=dtype)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> None:
        made.append((x.dtype, x.shape, weight.shape, None if bias is None else bias.shape))

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    side.device = device
    side.warm_up_blas()
    expected = [
        (dtype, (16, 16), (16, 16), bias)
        for dtype in (torch.float32, torch.float16)
        for bias in ((16,), None)
    ]
    assert made == (expected if device is GPU else [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("kernels", "base"), [("", ""), ("own", ""), ("own", "base")])
def test_kernels_are_shared_on_a_gpu_where_there_are_folders_of_them(
    device: str, kernels: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "current", torch.device)

    def installed(*given: Any) -> str:
        asked.append(given)
        return "once"

    monkeypatch.setattr(module, "installed", installed)
    made = Side(device, PACKAGE, FILES, kernels=kernels, base_kernels=base)
    there = device == "cuda" and kernels != ""
    expected: Any = "once" if there else None
    assert made.once == expected
    assert asked == ([(Path("own"), Path(base) if base else None)] if there else [])


def test_every_thread_is_pinned_and_again_to_the_processors_of_the_start(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, set[int]]] = []

    def pin(thread: int, processors: set[int]) -> None:
        pinned.append((thread, processors))
        if thread == 5:
            raise ProcessLookupError

    monkeypatch.setattr(module.os, "listdir", {"/proc/self/task": ["4", "5", "6"]}.__getitem__)
    monkeypatch.setattr(module.os, "sched_setaffinity", pin)
    side.processors = {0, 1}
    side.pin(0)
    side.pin(None)
    assert pinned == [(one, to) for to in ({0}, {0, 1}) for one in (4, 5, 6)]


def test_a_turn_of_an_op_has_a_seed_and_what_is_asked_comes_back(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfOp:
        def gated_turn(self, seed: int) -> dict[str, float]:
            return {"seed": seed}

    monkeypatch.setattr(module, "Subject", OfOp)
    other = SimpleNamespace(gated_turn=lambda: {"own": 1.0}, paced=lambda calls: calls / 8)
    side.subjects |= {"op": OfOp(), "step": other}
    assert side.turn("op", 3) == {"seed": 3}
    assert side.turn("step", 3) == {"own": 1.0}
    assert side.paced("step", 4) == 0.5


# -- what is handed on ----------------------------------------------------------------------------


def test_what_a_side_is_made_with_is_each_in_its_place() -> None:
    made = Side(
        "cpu", PACKAGE, FILES, slowed={"a": 0.5}, more="module:name", usual={DEVICE: 0.3}, own=None
    )
    assert (made.slowed, made.more, made.usual) == ({"a": 0.5}, "module:name", {DEVICE: 0.3})
    assert (made.package, made.files, made.own) == (PACKAGE, tuple(FILES), None)
    assert made.processors == os.sched_getaffinity(0)


def test_further_benchmarks_have_the_usual_slowdowns_where_they_state_none(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = Benchmark("stated", None, "m", {DEVICE: 0.7})
    silent = Benchmark("silent", None, "m")
    monkeypatch.setattr(module, "declared", lambda *given: [])
    monkeypatch.setattr(module, "_imported", lambda name: lambda device: [stated, silent])
    side.more = "given:by"
    found = {one.name: one.slowdowns for one in side.benchmarks()}
    assert found == {"stated": {DEVICE: 0.7}, "silent": ON_CPU}


def test_the_digests_are_of_every_op_or_of_ones_own(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = {name: f"op {name}" for name in "abc"}
    monkeypatch.setattr(module, "loaded", lambda package, files: (registry, {}))
    monkeypatch.setattr(module, "declarations", list)
    told: Any = side.declarations()
    assert told == ["op a", "op b", "op c"]
    own: Any = SimpleNamespace(providers=lambda registry, named: {"c": [], "a": []})
    side.own = own
    told = side.declarations()
    assert told == ["op c", "op a"]


def test_every_provider_that_is_left_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [(None, None, ["one"]), (None, None, ["other"])]
    monkeypatch.setattr(module, "_every", lambda *given: every)
    monkeypatch.setattr(module, "_left_out", lambda op, timed, device: f"{timed} reason")
    assert left_out(CPU, PACKAGE) == {"one reason": 1, "other reason": 1}


def test_only_what_another_process_compiled_meanwhile_counts_with_the_first_call(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, clock = SimpleNamespace(more=5.0), iter([10.0, 12.0])
    made: Any = once
    side.once = made

    def run_once() -> None:
        once.more += 3.0

    subject = SimpleNamespace(run_once=run_once)
    found = Benchmark("a", "timed", "m", ON_CPU, "factory:name")
    monkeypatch.setattr(side, "benchmarks", lambda: [found])
    monkeypatch.setattr(module, "_imported", lambda name: lambda timed, device: subject)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert side.begin("a") == 2.0 + 3.0


@pytest.mark.parametrize("of_op", [False, True])
def test_what_is_expected_is_warmed_up_and_of_an_op_rehearsed(
    of_op: bool, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Mock()
    monkeypatch.setattr(module, "Subject", Mock if of_op else Side)
    side.subjects["a"] = subject
    side.expect("a", "proofs", 0.5)
    rehearsed = [call.rehearse()] if of_op else []
    assert subject.mock_calls == [call.expect("proofs"), call.warm_up(0.5), *rehearsed]


def test_what_is_asked_of_a_subject_is_handed_on(side: Side) -> None:
    subject = Mock()
    side.subjects["a"] = subject
    side.compile_layouts("a", ["padded"])
    side.layouts("a", ["padded"])
    side.ready("a")
    assert side.paced("a", 4) is subject.paced.return_value
    assert side.counted("a") is subject.counted.return_value
    assert side.inputs("a") is subject.input_digest.return_value
    asked = [call.compile_layouts(["padded"]), call.layouts(["padded"], FEWEST_ROUNDS)]
    asked += [call.ready(), call.paced(4), call.counted(), call.input_digest()]
    assert subject.mock_calls == asked
    assert side._reserved() == 0


def test_the_place_of_an_own_op_is_its_file_and_of_others_their_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    op = SimpleNamespace(module="mine", name="op")
    provider = SimpleNamespace(module="theirs")
    monkeypatch.setattr(module, "loaded", lambda *given: ({}, {"mine": tmp_path / "src/a.py"}))
    monkeypatch.setattr(module, "_every", lambda *given: [(op, provider, ["case"])])
    for name, answer in {
        "_slowdowns": ON_CPU,
        "_left_out": None,
        "_laid_out": None,
        "_name": "name",
        "_moved": 7.0,
    }.items():
        monkeypatch.setattr(module, name, lambda *given, answer=answer: answer)
    for own, place in ((None, "mine"), ("own", "src/a.py")):
        (one,) = module.declared(CPU, PACKAGE, own=own)  # type: ignore[arg-type]
        assert (one.module, one.registered, one.moved) == (place, "theirs", 7.0)
        assert one.slowdowns == ON_CPU
