"""A plan repeats the calls of an op where nothing has changed, and nowhere else.

No GPU is needed: see `correctness_tests.support.posed`. test_plan_functions.py has what a plan is
made of.
"""

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from correctness_tests.support.planned import BOTH, SCALE, Calls, X, scale_kernel, scaled, shifted
from correctness_tests.support.posed import STREAM, Posed
from tinyllama.harness.declare.checked import signature
from tinyllama.harness.kernels import known, launch, plans
from tinyllama.harness.kernels.configs import Config, asked
from tinyllama.harness.kernels.launch import launched, processors, recorded


@pytest.fixture
def calls(posed: Posed) -> Calls:
    """An op whose calls with `X` are made by plans."""
    calls = Calls()
    for _ in range(3):
        calls(X)
    assert [plan.reason for plan in posed.plans] == [""] * 4
    assert calls.new(lambda: calls(X)) == []
    return calls


def test_two_calls_are_planned_and_later_ones_are_not_run(posed: Posed) -> None:
    calls = Calls()
    ran = [calls.new(functools.partial(calls, X + i)) for i in range(5)]
    assert ran == [BOTH, BOTH, BOTH, [], []]


UNLIKE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "address": ((shifted(1),), {}),
    "address, a multiple of 8 bytes": ((shifted(2),), {}),
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
    assert signature([torch.nn.Parameter(X, requires_grad=False)], {}) == usual
    assert signature([torch.nn.Parameter(X)], {}) != usual
    assert signature([X, None], {}) not in (usual, None)


class Odd(torch.Tensor):
    """A tensor that may hold its memory elsewhere."""


@pytest.mark.parametrize("value", [0.0, -0.0, 0, False, None, ""], ids=repr)
def test_equal_parameters_of_other_types_or_signs_have_other_signatures(value: Any) -> None:
    others = [0.0, -0.0, 0, False, None, ""]
    same = [one for one in others if signature([X], {"a": one}) == signature([X], {"a": value})]
    assert [repr(one) for one in same] == [repr(value)]


@contextlib.contextmanager
def traced_by_python() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lambda *event: None)
    try:
        yield
    finally:
        sys.settrace(before)


class Watcher(TorchDispatchMode):
    """Sees every call of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooked_kernel() -> Iterator[None]:
    scale_kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    try:
        yield
    finally:
        scale_kernel.pre_run_hooks.clear()
        launch._HOOKED.clear()


AFFECTED: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "launched": launched,
    "processors": lambda: processors(7),
    "configuration": lambda: SCALE.force(Config(BLOCK=32)),
    "asked": asked,
    "as written": known.as_written,
    "a debugger": traced_by_python,
    "a dispatch mode": Watcher,
    "a hook of a kernel": hooked_kernel,
}


@pytest.mark.parametrize("affected", AFFECTED.values(), ids=AFFECTED)
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
        for _ in range(4):
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


def test_launches_are_on_the_device_of_their_tensors(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another one is the current one, there is no plan to use."""
    current, seen = [1], []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    def stream_of(index: int) -> int:
        seen.append(current[0])
        return STREAM

    for plan in plans_of(calls):
        monkeypatch.setitem(plan.__globals__, "current_device", lambda: current[0])
        monkeypatch.setitem(plan.__globals__, "stream_of", stream_of)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(known, "stream_of", lambda: stream_of)
    assert calls.new(lambda: calls(X)) == BOTH
    assert (seen, current) == ([0, 0], [1])
    current[0] = 0
    assert calls.new(lambda: calls(X)) == []
    assert seen == [0] * 4


def plans_of(calls: Calls) -> list[Any]:
    """The plans that are used now."""
    (known_calls,) = calls.op["triton"].derived.known.values()  # type: ignore[union-attr]
    passes = [one for needs in known_calls._backward.values() for one in needs.values()]
    found = [one.run for one in (known_calls.forward, *passes)]
    assert all(plan.__name__ == "plan" for plan in found)
    return found


def test_results_are_new_memory_each_time(calls: Calls) -> None:
    first, second = (calls.op["triton"](X) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_a_plan_keeps_no_tensor(posed: Posed) -> None:
    calls, x = Calls(), torch.arange(64.0)
    for _ in range(4):
        calls(x)
    alive = weakref.ref(x)
    posed.specialised.clear()
    del x
    gc.collect()
    assert alive() is None


def test_a_launcher_of_another_form_is_called_by_its_kernel(
    posed: Posed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later Triton may take other arguments."""
    assert known.takes_stream(posed_kernel(posed))
    monkeypatch.setattr(known, "takes_stream", lambda kernel: False)
    calls = Calls()
    ran = [calls.new(lambda: calls(X)) for _ in range(4)]
    assert ran == [BOTH, BOTH, BOTH, []]


def posed_kernel(posed: Posed) -> Any:
    scaled(X, 2.0)
    return posed.specialised[-1]


def test_deterministic_algorithms_are_part_of_the_signature(calls: Calls) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert calls.new(lambda: calls(X)) == BOTH
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls.new(lambda: calls(X)) == []


def test_so_is_whether_a_gradient_is_required(calls: Calls) -> None:
    assert calls.new(lambda: calls.op["triton"](X)) == ["forward"]


@pytest.mark.parametrize(
    "value", [torch.arange(5000.0), object(), [1], {}], ids=lambda v: str(type(v))
)
def test_a_parameter_whose_text_need_not_tell_all_has_no_signature(value: Any) -> None:
    assert signature([X], {"a": value}) is None


def test_inference_mode_uses_and_makes_the_same_plans(posed: Posed) -> None:
    calls = Calls()
    with torch.inference_mode():
        x = torch.arange(64.0)
        for _ in range(4):
            y = calls.op["triton"](x)
            assert y.is_inference()
            assert torch.equal(y, x * 3)
    assert calls.ran == ["forward"] * 3
    with torch.no_grad():
        assert not calls.op["triton"](X).is_inference()
    calls(X)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_transforms_of_functions_are_refused(transform: Callable[..., Any], calls: Calls) -> None:
    """As by every autograd function without a rule of theirs: no plan is used before. Calls of
    plain tensors inside them are too."""
    x = X.clone()[None] if transform is torch.func.vmap else X.clone()
    with pytest.raises(RuntimeError, match=r"functorch|vmap|setup_context"):
        transform(lambda x: calls.op["triton"](x).sum())(x)
    with pytest.raises(RuntimeError, match="setup_context"):
        transform(lambda x: (calls.op["triton"](X) * x).sum())(x)


def test_transforms_are_refused_again_where_nothing_else_was_called(posed: Posed) -> None:
    """Not by an assertion of torch's own."""
    calls = Calls()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: calls.op["triton"](x).sum())(X.clone())


def test_a_tensor_that_was_a_transforms_is_unwrapped(calls: Calls) -> None:
    left: list[torch.Tensor] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(kept)(X.clone())
    assert torch.equal(calls.op["triton"](left[0]), X * 3)
    calls(X)
    assert torch.equal(calls.op["triton"](left[0]), X * 3)


def test_a_forward_derivative_is_refused(calls: Calls) -> None:
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises((RuntimeError, NotImplementedError), match="jvp"),
    ):
        calls.op["triton"](torch.autograd.forward_ad.make_dual(X, X))


def test_tensors_without_memory_have_no_plan(calls: Calls) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert signature([mode.from_tensor(X)], {}) is None


def test_threads_plan_and_use_plans_at_once(posed: Posed) -> None:
    calls, failed = Calls(), []

    def many(seed: int) -> None:
        for i in range(20):
            x = X + seed * 100 + i
            if not torch.equal(calls.op["triton"](x), x * 3):
                failed.append((seed, i))

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
