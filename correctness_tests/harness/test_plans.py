"""A plan repeats a function where nothing has changed, and nowhere else.

No GPU is needed: see `correctness_tests.support.posed`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.posed import STREAM, Posed
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.checked import signature
from tinyllama.harness.kernels import known, plans
from tinyllama.harness.kernels.configs import Config, Space, asked
from tinyllama.harness.kernels.launch import jit, launched, processors, recorded, tl
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.kernels.plans import Repeated


@jit
def scale_kernel(x, y, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, factor * tl.load(x + at, mask=at < n), mask=at < n)


SCALE = Space(
    "test_plans.scale",
    default=lambda: Config(BLOCK=16),
    configs=lambda: [Config(BLOCK=16), Config(BLOCK=32)],
)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = torch.empty_like(x)
    config = SCALE.choose(x.device)
    n = x.numel()
    scale_kernel[(-(-n // config["BLOCK"]),)](x, y, factor, n, **config.kwargs())
    return y


def scaling(name: str) -> tuple[Op, list[str]]:
    """y = factor x, and the passes that were run as they are written."""
    ran: list[str] = []
    op = Op(
        name,
        inputs={"x": Tensor("N", grad=True)},
        params={"factor": 3.0},
        outputs={"y": "N"},
        cases=[Case(N=64)],
    )

    @op.reference
    def eager(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return x * factor

    @op.provider("triton", requires=("triton",), replays=True)
    class Triton:
        @staticmethod
        def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
            ran.append("forward")
            return scaled(contiguous(x), factor)

        @staticmethod
        def backward(grads: Any, kept: Any, saved: Any, needs: Any, factor: float) -> Any:
            ran.append("backward")
            return {"x": scaled(grads[0].contiguous(), factor)}

    return op, ran


_NUMBER = iter(range(10**6))


class Calls:
    """An op of its own, and what its calls give."""

    def __init__(self) -> None:
        self.op, self.ran = scaling(f"scaling_{next(_NUMBER)}")

    def __call__(self, x: torch.Tensor, grad: torch.Tensor | None = None, **params: Any) -> None:
        """Whether the results are right; they may come from a plan."""
        x = x.detach().requires_grad_()
        y = self.op["triton"](x, **params)
        grad = torch.ones_like(y) if grad is None else grad
        y.backward(grad)
        factor = params.get("factor", 3.0)
        assert torch.equal(y, x * factor)
        assert x.grad is not None
        assert torch.equal(x.grad, grad * factor)

    def new(self, call: Callable[[], None]) -> list[str]:
        """The passes that a call ran as they are written."""
        before = len(self.ran)
        call()
        return self.ran[before:]


@pytest.fixture
def calls(posed: Posed) -> Calls:
    """An op whose calls with `X` are made by plans."""
    calls = Calls()
    for _ in range(2):
        calls(X)
    assert [plan.reason for plan in posed.plans] == ["", ""]
    assert calls.new(lambda: calls(X)) == []
    return calls


X = torch.arange(64.0)
BOTH = ["forward", "backward"]


def test_the_second_call_is_planned_and_later_ones_are_not_run(posed: Posed) -> None:
    calls = Calls()
    ran = [calls.new(functools.partial(calls, X + i)) for i in range(5)]
    assert ran == [BOTH, BOTH, [], [], []]


def shifted(places: int) -> torch.Tensor:
    return torch.arange(64.0 + places)[places:]


UNLIKE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "address": ((shifted(1),), {}),
    "shape": ((torch.arange(32.0),), {}),
    "dtype": ((X.bfloat16(),), {}),
    "stride": ((torch.arange(128.0)[::2],), {}),
    "parameter": ((X,), {"factor": 5.0}),
    "a parameter's type": ((X,), {"factor": 3}),
}


@pytest.mark.parametrize(("args", "params"), UNLIKE.values(), ids=UNLIKE)
def test_a_call_that_differs_is_made_as_it_is_written(
    args: tuple[Any, ...], params: dict[str, Any], calls: Calls
) -> None:
    assert calls.new(lambda: calls(*args, **params))[:1] == ["forward"]


def test_an_aligned_address_is_that_of_any_multiple_of_16_bytes(calls: Calls) -> None:
    assert calls.new(lambda: calls(shifted(4))) == []


@pytest.mark.parametrize(
    "grad",
    [shifted(1), torch.arange(128.0)[::2], torch.ones(()).expand(64), X.double().float()],
    ids=["address", "stride", "one element", "like"],
)
def test_a_backward_pass_is_repeated_for_gradients_of_one_layout(
    grad: torch.Tensor, calls: Calls
) -> None:
    like = grad.is_contiguous() and grad.data_ptr() % 16 == 0
    assert calls.new(lambda: calls(X, grad)) == ([] if like else ["backward"])


def test_autocast_is_part_of_the_signature(calls: Calls) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert calls.new(lambda: calls(X)) == BOTH


def test_so_are_the_precision_of_products_the_device_and_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = signature([X], {})
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert signature([X], {}) != usual
    monkeypatch.undo()
    assert signature([X.to("meta")], {}) != usual
    assert signature([X.as_subclass(Odd)], {}) is None
    assert signature([torch.nn.Parameter(X)], {}) == usual
    assert signature([X, None], {}) not in (usual, None)


class Odd(torch.Tensor):
    """A tensor that may hold its memory elsewhere."""


@pytest.mark.parametrize("value", [0.0, -0.0, 0, False, None, ""], ids=repr)
def test_equal_parameters_of_other_types_or_signs_have_other_signatures(value: Any) -> None:
    others = [0.0, -0.0, 0, False, None, ""]
    same = [one for one in others if signature([X], {"a": one}) == signature([X], {"a": value})]
    assert [repr(one) for one in same] == [repr(value)]


@pytest.mark.parametrize(
    "affected",
    [launched, lambda: processors(7), lambda: SCALE.force(Config(BLOCK=32)), asked],
    ids=["launched", "processors", "configuration", "asked"],
)
def test_whatever_watches_or_changes_launches_is_asked_each_time(
    affected: Callable[[], contextlib.AbstractContextManager[Any]], calls: Calls
) -> None:
    with affected():
        assert calls.new(lambda: calls(X)) == BOTH
    assert calls.new(lambda: calls(X)) == []


def test_a_forced_configuration_is_the_one_that_is_launched(calls: Calls) -> None:
    with launched() as seen, SCALE.force(Config(BLOCK=32)):
        calls(X)
    assert [one.grid for one in seen] == [(2,), (2,)]


def test_nothing_is_planned_meanwhile(posed: Posed) -> None:
    calls = Calls()
    with SCALE.force(Config(BLOCK=32)):
        for _ in range(3):
            assert calls.new(lambda: calls(X)) == BOTH
    assert posed.plans == []


def test_recorded_launches_are_not_made(calls: Calls) -> None:
    with recorded("sm_90") as launches:
        calls.op["triton"](X)
    assert [one.kernel.fn.__name__ for one in launches] == ["scale_kernel"]


def test_tensors_of_the_cpu_are_interpreted(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is for GPUs alone."""
    monkeypatch.undo()
    derived: Any = calls.op["triton"].derived
    derived.known.clear()
    monkeypatch.setattr(plans, "planned", None)
    for _ in range(4):
        assert calls.new(lambda: calls(X)) == BOTH


def test_hooks_of_triton_are_called(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler sees every launch."""
    assert not known.hooked()
    hook = lambda metadata: None  # noqa: E731
    monkeypatch.setattr(known, "hooks", lambda: (hook, None))
    assert calls.new(lambda: calls(X)) == BOTH


def test_a_chain_without_hooks_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chain:
        calls: tuple[Any, ...] = ()

    monkeypatch.setattr(known, "hooks", lambda: (Chain(), None))
    assert not known.hooked()
    monkeypatch.setattr(Chain, "calls", (print,))
    assert known.hooked()


def test_a_plan_launches_on_the_device_of_its_tensors(
    posed: Posed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [1]
    seen = []

    @contextlib.contextmanager
    def device(index: int) -> Any:
        before, current[0] = current[0], index
        yield
        current[0] = before

    def stream_of(index: int) -> int:
        seen.append(current[0])
        return STREAM

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(known, "stream_of", lambda: stream_of)
    calls = Calls()
    for _ in range(4):
        calls(X)
    assert seen == [0] * 7  # all launches but the one that is compiled
    assert current == [1]


# -- functions that have no plan ----------------------------------------------------------------


def copied(x: torch.Tensor) -> list[torch.Tensor]:
    return [scaled(contiguous(x[::2]), 2.0)]


def other_memory(x: torch.Tensor) -> list[torch.Tensor]:
    y = torch.empty_like(x)
    scale_kernel[(4,)](X, y, 2.0, 64, BLOCK=16)
    return [y]


def chosen_grid(x: torch.Tensor) -> list[torch.Tensor]:
    y = torch.empty_like(x)
    scale_kernel[lambda named: (4,)](x, y, 2.0, 64, BLOCK=16)
    return [y]


NO_PLAN: dict[str, tuple[Callable[..., Any], str]] = {
    "a value that is read": (lambda x: [scaled(x, x[0].item())], "gives no tensor"),
    "a copy": (copied, "copied to another layout"),
    "an argument": (lambda x: [x], "t0 is a result"),
    "a view of an argument": (lambda x: [x[:8]], "t0 is a result"),
    "a write": (lambda x: [scaled(x, 2.0).add_(1)], "writes to a0"),
    "a write to an argument": (lambda x: [scaled(x.mul_(1), 2.0)], "writes to t0"),
    "a view for torch": (lambda x: [scaled(x, 2.0)[:8] + 1], "a view of a0"),
    "other memory": (other_memory, "neither given nor made"),
    "another dtype": (lambda x: [scaled(x, 2.0).view(torch.int32)], "in another dtype"),
}


@pytest.mark.parametrize(("function", "reason"), NO_PLAN.values(), ids=NO_PLAN)
def test_there_is_no_plan_of(
    function: Callable[..., Any],
    reason: str,
    posed: Posed,
) -> None:
    results, plan = plans.planned(function, (X.clone(),))
    assert plan.call is None
    assert reason in plan.reason
    (result,) = results
    assert result is not None
    assert torch.equal(result, function(X.clone())[0])


def test_a_launch_that_triton_specialises_every_time_is_told(posed: Posed) -> None:
    seen: list[Any] = []
    with known.traced(seen.append):
        chosen_grid(X)
    assert seen == [None]
    watch = plans._Watch((X,))
    watch.launched(None)
    with pytest.raises(plans._UnplannedError, match="specialises at every launch"):
        watch.plan([], chosen_grid)


def test_tensors_that_share_memory_are_not_told_apart_by_a_plan(posed: Posed) -> None:
    both = torch.arange(128.0)
    function = lambda x, y: [scaled(x, 2.0), scaled(y, 2.0)]  # noqa: E731
    assert "share memory" in plans.planned(function, (both[:64], both[64:]))[1].reason
    assert "share memory" in plans.planned(function, (X, X))[1].reason


def test_a_function_without_a_plan_is_called(posed: Posed) -> None:
    put: list[Any] = []
    function = lambda x: [scaled(x, x[0].item())]  # noqa: E731
    again = Repeated(function, put.append)
    for first in (2.0, 3.0):
        x = X + first
        assert torch.equal(again(x)[0], x * first)
    assert put == [function]


# -- what a plan makes --------------------------------------------------------------------------


def test_steps_of_torch_and_views_are_repeated_in_their_order(posed: Posed) -> None:
    def function(x: torch.Tensor, y: torch.Tensor | None) -> list[torch.Tensor | None]:
        rows = scaled(x.view(4, 16)[1:], 2.0)  # from an address inside x
        total = rows.sum(0)
        return [rows.view(2, 24), total, scaled(total, 0.5), y, rows[0, :8]]

    _, plan = plans.planned(function, (X, None))
    assert plan.call is not None, plan.reason
    for x in (X + 1, X * 7):
        found = plan.call(x, None)
        for one, expected in zip(found, function(x, None), strict=True):
            assert (one is None) == (expected is None)
            if one is not None and expected is not None:
                assert torch.equal(one, expected)
                assert one.stride() == expected.stride()
    assert found[0].untyped_storage().data_ptr() == found[4].untyped_storage().data_ptr()


def test_memory_that_nothing_uses_is_not_taken(posed: Posed) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        torch.empty(1000)
        return [scaled(x, 2.0)]

    assert plans.planned(function, (X,))[1].source.count("empty") == 1


def test_results_are_new_memory_each_time(calls: Calls) -> None:
    first, second = (calls.op["triton"](X) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_a_plan_keeps_no_tensor(posed: Posed) -> None:
    calls, x = Calls(), torch.arange(64.0)
    for _ in range(3):
        calls(x)
    alive = weakref.ref(x)
    posed.specialised.clear()
    del x
    gc.collect()
    assert alive() is None


def test_a_plan_keeps_its_kernels(posed: Posed) -> None:
    """Triton unloads a kernel's code when nobody holds it."""
    plan = plans.planned(lambda x: [scaled(x, 2.0)], (X,))[1]
    alive = [weakref.ref(one) for one in posed.specialised]
    posed.specialised.clear()
    scale_kernel._ready.clear()
    gc.collect()
    assert [one() is None for one in alive] == [False]
    assert plan.call is not None


def test_a_plan_sees_the_launches_of_its_own_thread(posed: Posed) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        other = threading.Thread(target=scaled, args=(X, 5.0))
        other.start()
        other.join()
        return [scaled(x, 2.0)]

    plan = plans.planned(function, (X,))[1]
    assert plan.source.count("None, None, None") == 1


def test_a_launcher_of_another_form_is_called_by_its_kernel(
    posed: Posed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later Triton may take other arguments."""
    assert known.takes_stream(posed_kernel(posed))
    monkeypatch.setattr(known, "takes_stream", lambda kernel: False)
    calls = Calls()
    ran = [calls.new(lambda: calls(X)) for _ in range(3)]
    assert ran == [BOTH, BOTH, []]


def posed_kernel(posed: Posed) -> Any:
    scaled(X, 2.0)
    return posed.specialised[-1]
