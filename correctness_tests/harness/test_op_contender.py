"""A provider that is timed: readings of each pass, on fresh inputs and cold caches, and facts."""

import functools
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.contenders import (
    FILES,
    PACKAGE,
    Contender,
    contender_fixture,  # noqa: F401
    weighed,
)
from correctness_tests.support.launched import tree_ops
from tinyllama.harness.measure import op_contender
from tinyllama.harness.measure.clock import Reading
from tinyllama.harness.measure.op_contender import (
    BOTH,
    FORWARD,
    ops_of,
    timed_dtype,
    untimed,
)
from tinyllama.ops import OPS


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_right_provider_gives_readings_of_each_pass(contender: Contender, dtype: str) -> None:
    right = contender(weighed, dtype=dtype)
    for _ in range(25):
        readings = right.turn()
        assert list(readings) == [FORWARD, BOTH]
        for reading in readings.values():
            assert isinstance(reading, Reading)
            assert reading.queued
            assert 0 < reading.device < 1
            assert 0 < reading.host < 1


TREE = [(op.name, name) for op in tree_ops() for name in op.providers if op.timed]


@pytest.mark.parametrize(("op", "provider"), TREE)
def test_the_providers_of_the_tree_raise_no_false_alarm(
    contender: Contender, device: torch.device, op: str, provider: str
) -> None:
    if reason := untimed(OPS[op][provider], device):
        pytest.skip(reason)
    right = contender(provider, op)
    for _ in range(3):
        assert set(right.turn()) == set(right.passes)


def test_what_is_counted_on_the_host_has_no_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    counted = [
        str(provider)
        for op in tree_ops()
        for provider in op.providers.values()
        if "on the host" in (untimed(provider, torch.device("cuda")) or "")
    ]
    assert counted == ["adamw-default"]


def test_an_op_is_timed_in_the_usual_dtype_if_it_covers_that() -> None:
    assert timed_dtype(OPS["rms_norm"], "bf16") == "bf16"
    assert timed_dtype(OPS["adamw"], "bf16") == "fp32"


def test_inputs_are_fresh_and_caches_cold_in_each_round(contender: Contender) -> None:
    seen: list[torch.Tensor] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return weighed(x, weight)

    right = contender(call)
    flushes: list[int] = []
    made: list[torch.Tensor] = []

    def flush() -> None:
        flushes.append(len(seen))
        made.append(right.args.get("x", torch.empty(0)).detach().clone())

    right.flush = flush  # type: ignore[assignment]
    for _ in range(4):
        right.turn()
    assert len(seen) >= 1 + 2 * 4
    assert len({x.sum().item() for x in seen}) == len(seen)
    assert flushes == list(range(1, len(seen))), "ahead of each try to time a call"
    assert all(map(torch.equal, made, seen[1:])), "behind the making of inputs, which warms caches"


def test_compiled_is_the_reference_under_the_compiler(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Mock(**{"compile.side_effect": lambda call, **_: call})
    monkeypatch.setattr(torch, "compile", compiler.compile)
    monkeypatch.setattr(torch.compiler, "reset", compiler.reset)
    right = contender("compile")
    # Else so many ops of one process would be too many for one function.
    assert [name for name, *_ in compiler.method_calls] == ["reset", "compile"]
    assert set(right.turn()) == {FORWARD, BOTH}
    assert right.case.provider.name == "compile"


def test_what_a_provider_does_not_cover_has_a_reason(contender: Contender) -> None:
    assert contender("float32_only").cannot() is None
    assert contender("float32_only", dtype="bf16").cannot() == (
        "weigh_rows-float32_only does not support bf16"
    )


def test_a_call_that_waits_is_timed_by_what_the_device_does(contender: Contender) -> None:
    """Its gaps are the host's, and no queue runs ahead of it."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.sum().item() != 0
        time.sleep(0.05)
        return weighed(x, weight)

    for reading in contender(call, waits=True).turn().values():
        assert 0 < reading.device < 0.05 <= reading.host
        assert not reading.queued


def test_layouts_see_a_provider_that_is_slow_on_strided_inputs(contender: Contender) -> None:
    """The documented fault: 20 times slower on inputs that are not contiguous."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            time.sleep(2e-3)
            if x.device.type != "cpu":
                torch.cuda._sleep(4_000_000)
        return weighed(x, weight)

    found = contender(call).layouts(("strided", "expanded"), rounds=8)
    assert set(found) == {"strided", "expanded"}
    for median, low, high in found.values():
        assert low <= median <= high
        assert median > 2


def test_layouts_of_a_provider_that_does_not_care_are_near_one(contender: Contender) -> None:
    ((median, _, _),) = contender(weighed).layouts(("transposed",), rounds=8).values()
    assert 0.2 < median < 5


def test_facts_are_of_each_pass(contender: Contender, device: torch.device) -> None:
    found = contender(weighed).facts()
    assert set(found) == {FORWARD, BOTH}
    for facts in found.values():
        assert set(facts) == {"peak_bytes", "kernels"}
        if device.type == "cpu":
            assert set(facts.values()) == {None}, "a CPU counts neither"
        else:
            assert facts["peak_bytes"] >= 16 * 64 * 4
            assert facts["kernels"] >= 1


def test_the_last_pass_is_run_where_one_stands_for_all(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = contender(weighed), []

    def prepare(name: str, layout: str = "") -> None:
        asked.append((name, layout))

    run = functools.partial(time.sleep, 1e-5)
    for name, stub in {"_prepare": prepare, "_run": run, "_check": lambda: None}.items():
        monkeypatch.setattr(made, name, stub)
    monkeypatch.setattr(op_contender.OpContender, "passes", ("first", "second", "last"))
    made.run_once()
    assert asked == [("last", "")]
    asked.clear()
    made.warm_up(1e-4)
    assert set(asked) == {("last", "")}
    asked.clear()

    def read(run: Callable[[], None], before: Callable[[], None]) -> SimpleNamespace:
        before()
        return SimpleNamespace(device=1.0)

    monkeypatch.setattr(made, "clock", SimpleNamespace(read=read))
    made.layouts(("strided",), rounds=8)
    assert set(asked) == {("last", "contiguous"), ("last", "strided")}


def test_each_fact_is_of_a_call_on_fresh_inputs_of_its_pass(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, done = contender(weighed), []

    def counted(run: Any, device: Any) -> SimpleNamespace:
        done.append("kernels")
        return SimpleNamespace(kernels=3)

    monkeypatch.setattr(op_contender, "launches", counted)
    monkeypatch.setattr(made, "_prepare", done.append)
    monkeypatch.setattr(made, "_peak", lambda: done.append("peak"))
    assert made.facts() == {one: {"peak_bytes": None, "kernels": 3} for one in (FORWARD, BOTH)}
    assert done == [FORWARD, "peak", FORWARD, "kernels", BOTH, "peak", BOTH, "kernels"]


def test_the_peak_is_of_one_call_and_not_less_by_what_the_last_one_left(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, live = contender(weighed), []

    def allocated(device: Any) -> int:
        live.append(made.outputs or made.gradients)
        return 100

    monkeypatch.setattr(op_contender, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 300)
    made.turn()
    assert made.outputs
    assert made.gradients
    made.device = torch.device("cuda")  # its inputs stay where they are
    assert made._peak() == 200
    assert live == [()]


@pytest.mark.parametrize("reserved", [0, 100, 101])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_much_memory_of_a_check_is_given_back(
    kind: str, reserved: int, contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a sixteenth of the device's."""
    made, forgot = contender(weighed), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (17, 1600))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(made, "_forget", lambda: forgot.append(True))
    made.device, made.emptied = torch.device(kind), False
    made._shrink()
    much = kind == "cuda" and reserved > 100
    assert (made.emptied, forgot) == (much, [True] * much)


def test_results_of_the_first_check_are_freed_for_other_processes(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 they are the largest; what still holds them keeps them from other processes."""
    made, evaluated = contender(weighed), op_contender.evaluate
    results: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def evaluate(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = evaluated(*args, **options)
        results.extend(map(weakref.ref, found.values()))
        return found

    def forget() -> None:
        held.append(sum(one() is not None for one in results))

    monkeypatch.setattr(op_contender, "evaluate", evaluate)
    monkeypatch.setattr(made, "_forget", forget)
    made.check_first()
    assert len(results) >= 6  # of the provider and of the reference: y and two gradients
    assert held == [0]


def size(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.numel() * tensor.element_size()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_both_passes_hold_what_they_give(contender: Contender) -> None:
    made = contender(weighed)
    first = made.facts()
    results = sum(map(size, (*made.outputs, *made.gradients)))
    made.turn()
    assert made.facts() == first
    assert first[BOTH]["peak_bytes"] >= results > first[FORWARD]["peak_bytes"]


def test_warming_up_takes_the_time_that_it_is_given(contender: Contender) -> None:
    calls: list[None] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return weighed(x, weight)

    warm = contender(call)
    start = time.perf_counter()
    warm.warm_up(0.1)
    assert 0.1 <= time.perf_counter() - start < 5
    assert len(calls) > 2


def test_ops_are_found_once_in_a_process() -> None:
    assert ops_of(PACKAGE, FILES) is ops_of(PACKAGE, FILES)
    assert set(ops_of(PACKAGE, FILES)) == {op.name for op in tree_ops()} | {"weigh_rows"}


def test_what_was_freed_is_allocated_again_before_a_reading(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append("called")
        return weighed(x, weight)

    def read(call: Callable[[], object], before: Callable[[], object]) -> Reading:
        before()  # once: a clock repeats what the host's load delays
        calls.append("read")
        call()
        return Reading(1e-3, 1e-3, queued=True)

    right = contender(call)
    monkeypatch.setattr(right.clock, "read", read)
    calls.clear()
    right.turn()
    assert calls == ["read", "called"] * 2
    right._forget()
    right.emptied = True
    calls.clear()
    right.turn()
    assert calls == ["called", *["read", "called"] * 2]
    assert not right.emptied


@pytest.mark.parametrize(
    ("bound", "size", "allowed"),
    [
        ((2.0, 0.1, 0.05), 4.0, (0.2, 0.2)),
        ((2.0, 0.1, 0.05), 1.0, (0.05, 0.05)),
        ((0.1, 0.1, 0.05), 4.0, (0.1, 0.1)),  # of a result that is within its error of zero
    ],
)
def test_an_allowed_error_grows_with_the_result_and_more_in_a_row(
    bound: tuple[float, float, float], size: float, allowed: tuple[float, float]
) -> None:
    assert op_contender._Bound(*bound).scaled_to(size) == pytest.approx(allowed)


def test_what_modules_declare_are_their_ops_and_their_providers_of_others() -> None:
    def op(name: str, module: str, **providers: str) -> SimpleNamespace:
        each = {one: SimpleNamespace(name=one, module=of) for one, of in providers.items()}
        return SimpleNamespace(name=name, module=module, providers=each)

    ops = [
        op("none", "other", eager="other"),
        op("own", "mine", eager="mine", theirs="other"),
        op("others", "other", eager="other", fast="mine", last="mine"),
    ]
    registry: Any = {one.name: one for one in ops}
    found = op_contender.declared_by(registry, ["mine"])
    names = {name: [one.name for one in each] for name, each in found.items()}
    assert names == {"own": ["eager", "theirs"], "others": ["fast", "last"]}


@pytest.mark.parametrize(
    ("name", "requires", "on_host", "device", "reason"),
    [
        ("one", (), False, "cpu", None),
        ("one", ("gpu", "triton"), False, "cpu", "no gpu"),
        ("one", ("triton",), False, "cpu", "on a CPU its kernels are interpreted"),
        ("one", ("triton",), False, "cuda", None),
        ("compile", ("compile",), False, "cpu", "compiled ops are timed on a GPU"),
        ("compile", ("compile",), False, "cuda", None),
        ("one", (), True, "cpu", None),
        ("one", (), True, "cuda", "it reads its step count on the host"),
        ("one", ("fp8",), False, "cuda", "no fp8"),
    ],
)
def test_why_a_provider_is_not_timed(
    name: str,
    requires: tuple[str, ...],
    on_host: bool,
    device: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = {"gpu": "no gpu", "fp8": "no fp8"}
    monkeypatch.setattr(op_contender, "cannot", lambda need, device: lacking.get(need))
    provider: Any = SimpleNamespace(name=name, requires=requires, counts_on_host=on_host)
    found = op_contender.untimed(provider, torch.device(device))
    assert found is None if reason is None else str(found).startswith(reason)
