"""A plan repeats a function where nothing has changed, and nowhere else.

No GPU is needed: see `correctness_tests.support.posed`.
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

from correctness_tests.support.posed import STREAM, Posed
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.checked import signature
from tinyllama.harness.kernels import known, launch, plans
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
    for _ in range(3):
        calls(X)
    assert [plan.reason for plan in posed.plans] == [""] * 4
    assert calls.new(lambda: calls(X)) == []
    return calls


X = torch.arange(64.0)
BOTH = ["forward", "backward"]


def test_two_calls_are_planned_and_later_ones_are_not_run(posed: Posed) -> None:
    calls = Calls()
    ran = [calls.new(functools.partial(calls, X + i)) for i in range(5)]
    assert ran == [BOTH, BOTH, BOTH, [], []]


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
    found = [known_calls.forward, *known_calls._backward.values()]
    assert all(plan.__name__ == "plan" for plan in found)
    return found


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


def copied_to_the_host(x: torch.Tensor) -> list[torch.Tensor]:
    """As where a value is read without a call that is seen: ``x.cpu().numpy()``."""
    return [scaled(x, float(x.to("meta", copy=True).numel()))]


def filled_by_others(x: torch.Tensor) -> list[torch.Tensor]:
    """A launch past `tinyllama.harness.kernels.jit`, such as of a raw ``triton.jit`` kernel."""
    y = torch.empty_like(x)
    with _disable_current_modes():
        y.copy_(x)
    return [y]


NO_PLAN: dict[str, tuple[Callable[..., Any], str]] = {
    "a value that is read": (lambda x: [scaled(x, x[0].item())], "gives no tensor"),
    "another device": (copied_to_the_host, "makes a tensor on meta"),
    "what is not seen": (filled_by_others, "no step that is seen fills a1"),
    "a list": (lambda x: [torch.cat([scaled(x, 2.0), scaled(x, 3.0)])], "a list of tensors"),
    "a copy": (copied, "copied to another layout"),
    "an argument": (lambda x: [x], "t0 is a result"),
    "a view of an argument": (lambda x: [x[:8]], "t0 is a result"),
    "a write": (lambda x: [scaled(x, 2.0).add_(1)], "add_.Tensor writes"),
    "a write to an argument": (lambda x: [scaled(x.mul_(1), 2.0)], "mul_.Tensor writes"),
    "a view for torch": (lambda x: [scaled(x, 2.0)[:8] + 1], "a view of a1"),
    "other memory": (other_memory, "neither given nor made"),
    "another dtype": (lambda x: [scaled(x, 2.0).view(torch.int32)], "in another dtype"),
}


@pytest.mark.parametrize(("function", "reason"), NO_PLAN.values(), ids=NO_PLAN)
def test_there_is_no_plan_of(function: Callable[..., Any], reason: str, posed: Posed) -> None:
    results, plan = plans.planned(function, (X.clone(),))
    assert plan.source == ""
    assert reason in plan.reason
    (result,) = results
    assert result is not None
    assert torch.equal(result, function(X.clone())[0])


def test_torch_is_repeated_below_autocast(posed: Posed) -> None:
    """The code may turn autocast off: the product would have operands of 16 bits otherwise."""

    def product(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", enabled=False):
            return [torch.mm(x, x)]

    x = torch.full((16, 16), 1.001)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call, put = repeated(product)
        for _ in range(4):
            assert torch.equal(call(x)[0], product(x)[0])
    assert [one.__name__ for one in put] == ["plan"]


def test_a_launch_that_triton_specialises_every_time_is_told(posed: Posed) -> None:
    seen: list[Any] = []
    with known.traced(seen.append):
        chosen_grid(X)
    assert seen == [None]
    watch = plans._Watch(chosen_grid, (X,))
    watch.launched(None)
    assert "specialises at every launch" in watch.plan([]).reason


def test_tensors_that_share_memory_are_not_told_apart_by_a_plan(posed: Posed) -> None:
    both = torch.arange(128.0)
    function = lambda x, y: [scaled(x, 2.0), scaled(y, 2.0)]  # noqa: E731
    assert "share memory" in plans.planned(function, (both[:64], both[64:]))[1].reason
    assert "share memory" in plans.planned(function, (X, X))[1].reason


def test_there_is_no_plan_from_an_address_that_is_no_multiple_of_16_bytes(posed: Posed) -> None:
    """Its kernels are compiled for such addresses."""
    reason = plans.planned(lambda x: [scaled(x, 2.0)], (shifted(1),))[1].reason
    assert reason == "t0 does not begin at a multiple of 16 bytes"


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
    assert plan.reason == ""
    for x in (X + 1, X * 7):
        found = plan.made()(x, None)
        for one, expected in zip(found, function(x, None), strict=True):
            assert (one is None) == (expected is None)
            if one is not None and expected is not None:
                assert torch.equal(one, expected)
                assert one.stride() == expected.stride()
    assert found[0].untyped_storage().data_ptr() == found[4].untyped_storage().data_ptr()


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


def test_a_plan_keeps_its_kernels(posed: Posed) -> None:
    """Triton unloads a kernel's code when nobody holds it."""
    plan = plans.planned(lambda x: [scaled(x, 2.0)], (X,))[1]
    alive = [weakref.ref(one) for one in posed.specialised]
    posed.specialised.clear()
    scale_kernel._ready.clear()
    gc.collect()
    assert [one() is None for one in alive] == [False]
    assert plan.reason == ""


def test_a_plan_sees_the_launches_of_its_own_thread(posed: Posed) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        other = threading.Thread(target=scaled, args=(X, 5.0))
        other.start()
        other.join()
        return [scaled(x, 2.0)]

    plan = plans.planned(function, (X,))[1]
    assert plan.source.count("None, None, None") == 1


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


# -- what a plan must not miss ------------------------------------------------------------------


def repeated(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The function as a provider's pass is called, and what was put in its place."""
    put: list[Any] = []
    again = Repeated(function, put.append)
    return lambda *tensors: (put[-1] if put else again)(*tensors), put


def test_a_number_that_python_counts_is_found_out(posed: Posed) -> None:
    count = iter(range(1, 100))
    call, put = repeated(lambda x: [scaled(x, float(next(count)))])
    found = [call(X)[0] for _ in range(5)]
    assert all(torch.equal(one, X * i) for i, one in enumerate(found, 1))
    assert [one.__name__ for one in put] == ["<lambda>"]


def test_so_is_a_step_that_is_made_at_times(posed: Posed) -> None:
    count = iter(range(100))
    call, _ = repeated(lambda x: [scaled(x, 2.0) if next(count) % 2 else scaled(x, 2.0) + 1])
    found = [call(X)[0] for _ in range(6)]
    assert all(torch.equal(one, X * 2 + (i % 2 == 0)) for i, one in enumerate(found))


def test_random_numbers_of_torch_are_drawn_at_each_call(posed: Posed) -> None:
    call, put = repeated(lambda x: [scaled(torch.rand_like(x), 2.0)])
    first, *others = [call(X)[0] for _ in range(5)]
    assert put[0].__name__ == "plan"
    assert not any(torch.equal(first, one) for one in others)


def test_a_planned_call_inside_a_planned_one_is_seen(posed: Posed) -> None:
    """A plan launches past what watches, so none is used while someone watches."""
    inner, put = repeated(lambda x: [scaled(x, 2.0)])
    for _ in range(4):
        inner(X)
    assert put[0].__name__ == "plan"
    outer, put = repeated(lambda x: [scaled(inner(x)[0], 3.0)])
    for i in range(5):
        assert torch.equal(outer(X + i)[0], (X + i) * 6)
    assert put[0].__name__ == "plan"


def test_one_tensor_may_be_given_twice(posed: Posed) -> None:
    call, put = repeated(lambda x, y: [scaled(x, 2.0) if x is y else scaled(y, 3.0)])
    for _ in range(3):
        call(X, X + 1)
    assert put[0].__name__ == "plan"
    call, put = repeated(lambda x, y: [scaled(x, 2.0), scaled(y, 3.0)])
    for _ in range(3):
        call(X, X + 1)
    assert [torch.equal(one, X * i) for one, i in zip(call(X, X), (2, 3), strict=True)] == [
        True
    ] * 2


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
    """As by every autograd function without a rule of theirs: no plan is used before."""
    x = X.clone()[None] if transform is torch.func.vmap else X.clone()
    with pytest.raises(RuntimeError, match=r"functorch|vmap|setup_context"):
        transform(lambda x: calls.op["triton"](x).sum())(x)


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


def test_memory_between_steps_is_not_shared(posed: Posed) -> None:
    """Tensors that die in the function are seen with their own memory, though it is free again."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(50):
            torch.empty_like(x)  # free at once
        return [scaled(x, 2.0)]

    plan = plans.planned(function, (X,))[1]
    assert plan.reason == ""
    assert plan.source.count("= empty(") == 51


def test_amd_gpus_keep_the_ordinary_way() -> None:
    """Their backend specialises kernels by more than addresses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backends = [make_backend(GPUTarget(*of)) for of in (("hip", "gfx942", 64), ("cuda", 90, 32))]
    assert [known.specialises_by_address(type(one)) for one in backends] == [False, True]
