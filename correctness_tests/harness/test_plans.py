"""A plan repeats the calls of an op where nothing has changed, and nowhere else.

No GPU is needed: see `correctness_tests.support.posed`.
"""

import contextlib
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

from correctness_tests.support.posed import Posed
from correctness_tests.support.tried import derived
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import launch, launch_cache
from tinyllama.harness.kernels.chips import processors
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.launch import jit, launched, recorded, tl
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.kernels.plans import Repeated


@jit
def scale_kernel(x, y, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, factor * tl.load(x + at, mask=at < n), mask=at < n)


SCALE = Space(
    "planned.scale",
    default=lambda: Config(BLOCK=16),
    configs=lambda: [Config(BLOCK=16), Config(BLOCK=32)],
)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = torch.empty_like(x)
    config = SCALE.choose(x.device)
    n = x.numel()
    scale_kernel[(-(-n // config["BLOCK"]),)](x, y, factor, n, **config.kwargs())
    return y


NUMBERS = itertools.count()  # torch knows a custom op by its name
BOTH = ["forward", "backward"]
X = torch.arange(64.0)


def shifted(places: int) -> torch.Tensor:
    return torch.arange(64.0 + places)[places:]


class Calls:
    """An op of its own, y = factor x, whose calls plans may repeat.

    ran: the passes that were run as they are written."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        inputs = {"x": Tensor("N", grad=True)}
        self.op = Op(
            f"scaling_{next(NUMBERS)}",
            inputs=inputs,
            params={"factor": 3.0},
            outputs={"y": "N"},
            cases=[Case(N=64)],
        )
        self.op.reference(lambda x, factor=3.0: x * factor)

        def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
            self.ran.append("forward")
            return scaled(contiguous(x), factor)

        def backward(grads: Any, kept: Any, saved: Any, needs: Any, factor: float) -> Any:
            self.ran.append("backward")
            return {"x": scaled(grads[0].contiguous(), factor)}

        self.op.provider("triton", requires=("triton",), replays=True)(derived(forward, backward))

    def __call__(self, x: torch.Tensor, grad: torch.Tensor | None = None, **params: Any) -> None:
        """Call it, and its backward pass; the results are right, whether from a plan or not."""
        x = x.detach().requires_grad_()
        y = self.op["triton"](x, **params)
        grad = torch.ones_like(y) if grad is None else grad
        y.backward(grad)
        factor = params.get("factor", 3.0)
        assert torch.equal(y, x * factor)
        assert x.grad is not None
        assert torch.equal(x.grad, grad * factor)

    def new(self, call: Callable[[], None]) -> list[str]:
        """The passes that a call runs as they are written."""
        before = len(self.ran)
        call()
        return self.ran[before:]


@pytest.fixture
def calls(posed: Posed) -> Calls:
    """An op whose calls with `X` are made by plans: the first three were run."""
    calls = Calls()
    ran = [calls.new(functools.partial(calls, X + i)) for i in range(5)]
    assert ran == [BOTH, BOTH, BOTH, [], []]
    assert [plan.reason for plan in posed.plans] == [""] * 4
    return calls


UNLIKE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "address": ((shifted(1),), {}),
    "address, a multiple of 8 bytes": ((shifted(2),), {}),
    "shape": ((torch.arange(32.0),), {}),
    "dtype": ((X.bfloat16(),), {}),
    "stride": ((torch.arange(128.0)[::2],), {}),
    "parameter": ((X,), {"factor": 5.0}),
    "a parameter of zero": ((X,), {"factor": 0.0}),
    "a parameter's type": ((X,), {"factor": 3}),
}


@pytest.mark.parametrize(("args", "params"), UNLIKE.values(), ids=UNLIKE)
def test_a_call_that_differs_is_made_as_it_is_written(
    args: tuple[Any, ...], params: dict[str, Any], calls: Calls
) -> None:
    assert calls.new(lambda: calls(*args, **params))[:1] == ["forward"]
    assert calls.new(lambda: calls(shifted(4))) == [], "any multiple of 16 bytes is one address"


@pytest.mark.parametrize("grad", [shifted(1), torch.arange(128.0)[::2], torch.ones(()).expand(64)])
def test_so_is_a_backward_pass_of_another_layout(grad: torch.Tensor, calls: Calls) -> None:
    assert calls.new(lambda: calls(X, grad)) == ["backward"]
    assert calls.new(lambda: calls(X, X + 1)) == []


@contextlib.contextmanager
def traced_by_python() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lambda *event: None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def hooked_kernel() -> Iterator[None]:
    scale_kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    try:
        yield
    finally:
        scale_kernel.pre_run_hooks.clear()
        launch._HOOKED.clear()


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


AFFECTED: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "launched": launched,
    "processors": lambda: processors(7),
    "configuration": lambda: SCALE.force(Config(BLOCK=32)),
    "as written": launch_cache.as_written,
    "a debugger": traced_by_python,
    "a dispatch mode": Watcher,
    "a hook of a kernel": hooked_kernel,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "deterministic algorithms": deterministic,
}


@pytest.mark.parametrize("affected", AFFECTED.values(), ids=AFFECTED)
def test_no_plan_is_used_while_launches_are_watched_or_changed(
    affected: Callable[[], contextlib.AbstractContextManager[Any]], calls: Calls
) -> None:
    with affected():
        assert calls.new(lambda: calls(X)) == BOTH
    assert calls.new(lambda: calls(X)) == []
    assert calls.new(lambda: calls.op["triton"](X)) == ["forward"], "no gradient is required"
    with recorded("sm_90") as launches:
        calls.op["triton"](X)
    assert [each.kernel for each in launches] == [scale_kernel]


# -- what a plan can repeat -------------------------------------------------------------------


def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as the passes of a provider are called, by its plan from the fourth call on."""
    again = Repeated(function)
    return lambda *tensors: again.run(*tensors)


def another_grid(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    scale_kernel[lambda named: (4,)](x, y, 2.0, 64, BLOCK=16)
    return y


def filled_by_others(x: torch.Tensor) -> torch.Tensor:
    """As by a kernel that is not launched by `tinyllama.harness.kernels.jit`."""
    y = torch.empty_like(x)
    with _disable_current_modes():
        y.copy_(x)
    return y


def without_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.mm(x.view(8, 8), x.view(8, 8))


def in_parts(x: torch.Tensor) -> torch.Tensor:
    """Products into the halves of a buffer, sums in place, and a kernel between them."""
    rows, both = x.view(4, 16), torch.empty(4, 8)
    for half, part in zip(both.chunk(2, -1), rows.split(8, -1), strict=True):
        torch.mm(part, x[:32].view(8, 4), out=half)
    twice = scaled(both, 2.0).view(4, 8)
    twice.addmm_(rows[:, :4], both[:4])
    twice[1:].add_(1.0)
    return twice.t()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a value that is read": lambda x: scaled(x, x[1].item()),
    "a list": lambda x: torch.cat([scaled(x, 2.0), scaled(x, 3.0)]),
    "a copy": lambda x: scaled(contiguous(x.view(8, 8).T).view(64), 2.0),
    "an argument": lambda x: x,
    "a view of an argument": lambda x: x[:8],
    "a new size": lambda x: scaled(x, 2.0).resize_(8),
    "another dtype": lambda x: scaled(x, 2.0).view(torch.int32) + 1,
    "the other sign": lambda x: torch._neg_view(scaled(x, 2.0)) + 1,
    "another grid": another_grid,
    "what is not seen": filled_by_others,
    "autocast turned off": without_autocast,
    "products in parts": in_parts,
    "an address inside of an argument": lambda x: scaled(x.view(4, 16)[1:], 2.0).sum(0),
    "memory that is free again": lambda x: scaled(scaled(scaled(x, 2.0), 3.0), 4.0)[:8],
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_gives_its_own_results_whatever_it_does(
    function: Callable[[torch.Tensor], torch.Tensor], posed: Posed
) -> None:
    call, inside = repeated(lambda x: [function(x)]), torch.arange(128.0)[4:68]
    negative = torch.complex(torch.zeros(64), -X).conj().imag  # of its memory
    with torch.autocast("cpu", torch.bfloat16):
        for x in (X, X + 1, X * 3, X * 0.5, inside, shifted(1), negative, X - 7):
            assert torch.equal(call(x)[0], function(x))


def test_what_python_counts_or_torch_draws_is_new_in_each_call(posed: Posed) -> None:
    count = iter(range(1, 100))
    counting = repeated(lambda x: [scaled(x, float(next(count)))])
    assert all(torch.equal(counting(X)[0], X * i) for i in range(1, 6))
    drawing = repeated(lambda x: [scaled(torch.rand_like(x), 2.0)])
    first, *others = [drawing(X)[0] for _ in range(5)]
    assert not any(torch.equal(first, other) for other in others)


def test_arguments_may_share_memory_and_calls_may_nest(posed: Posed) -> None:
    inner = repeated(lambda x, y: [scaled(x, 2.0), scaled(y, 3.0)])
    outer = repeated(lambda x, y: [scaled(inner(x, y)[1], 3.0)])
    both = torch.arange(128.0)
    for x, y in ((X, X + 1), (X, X + 2), (X, X + 3), (X, X), (both[:64], both[64:])):
        assert all(map(torch.equal, inner(x, y), (x * 2, y * 3)))
        assert torch.equal(outer(x, y)[0], y * 9)


def test_a_plan_keeps_no_tensor_and_makes_new_memory(posed: Posed) -> None:
    calls, x = Calls(), torch.arange(64.0)
    for _ in range(4):
        calls(x)
    first, second = (calls.op["triton"](x) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    alive = weakref.ref(x)
    posed.specialised.clear()
    del x, first, second
    gc.collect()
    assert alive() is None
