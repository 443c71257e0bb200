"""What a plan makes of a function of tensors, of which functions there is none, and what it must
not miss. No GPU is needed: see `correctness_tests.support.posed`."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

from correctness_tests.support.planned import X, scale_kernel, scaled, shifted
from correctness_tests.support.posed import Posed
from tinyllama.harness.kernels import HAS_DESCRIPTORS, described, jit, known, plans, tl
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.kernels.plans import Repeated


@jit
def double_kernel(rows, y, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(y + tl.arange(0, WIDTH), 2 * rows.load([0, 0]).reshape(WIDTH))


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
    "a write to an argument": (lambda x: [scaled(x.mul_(1), 2.0)], "mul_.Tensor writes to"),
    "a write to its view": (lambda x: [scaled(x, 2.0), x[:8].zero_()][:1], "zero_.default writes"),
    "a new size": (lambda x: [scaled(x, 2.0).resize_(8)], "resize_.default writes to"),
    "a view in another dtype": (
        lambda x: [scaled(x, 2.0).view(torch.int32) + 1],
        "a1 in another dtype",
    ),
    "a view of the other sign": (
        lambda x: [torch._neg_view(scaled(x, 2.0)) + 1],
        "a1 in another dtype, or as its conjugate",
    ),
    "a conjugate": (lambda x: [torch.complex(x, x).conj() + 1], "or as its conjugate"),
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


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton makes no descriptors on the host")
def test_descriptors_are_made_for_the_memory_of_each_call(posed: Posed) -> None:
    def tiles(x: torch.Tensor) -> list[torch.Tensor]:
        """Both rows of 32 numbers, each doubled, from a descriptor of a view."""
        y = torch.empty_like(x)
        rows, written = x.view(2, 32)[1:], y.view(2, 32)
        double_kernel[(1,)](described(rows, (1, 32)), written[:1], WIDTH=32)
        double_kernel[(1,)](described(x.view(2, 32)[:1], (1, 32)), written[1:], WIDTH=32)
        return [y]

    def right(x: torch.Tensor, found: Any) -> bool:
        return torch.equal(found[0], torch.cat([2 * x[32:], 2 * x[:32]]))

    _, first = plans.planned(tiles, (torch.zeros(64),))  # whose memory the stand-in holds
    x = X.clone()
    results, plan = plans.planned(tiles, (x,))
    assert right(x, results)
    assert plan.reason == ""
    assert plan == first, "which `Repeated` asks"
    asked = len(posed.specialised)
    repeat, other = plan.made(), X + 5
    known_memory = weakref.ref(x.untyped_storage())
    del x, results
    gc.collect()
    assert known_memory() is None, "a plan keeps no memory"
    assert right(other, repeat(other))
    assert right(X * 3, repeat(X * 3))
    assert len(posed.specialised) == asked


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


def test_steps_of_torch_and_views_are_repeated_in_their_order(posed: Posed) -> None:
    def function(x: torch.Tensor, y: torch.Tensor | None) -> list[torch.Tensor | None]:
        rows = scaled(x.view(4, 16)[1:], 2.0)  # from an address inside x
        total = rows.sum(0)
        turned = scaled(x.view(8, 8), 2.0).t()
        return [rows.view(2, 24), total, scaled(total, 0.5), y, rows[0, :8], turned]

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


def test_what_torch_writes_to_memory_of_the_function_is_repeated(posed: Posed) -> None:
    """Products into the halves of a buffer, sums in place, and a kernel between them."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        rows, both = x.view(4, 16), torch.empty(4, 8)
        for half, part in zip(both.chunk(2, -1), rows.split(8, -1), strict=True):
            torch.mm(part, x[:32].view(8, 4), out=half)
        twice = scaled(both, 2.0).view(4, 8)
        twice.addmm_(rows[:, :4], both[:4])
        twice[1:].add_(1.0)
        return [twice, both.view(8, 4)]

    call, put = repeated(function)
    inside = torch.cat([torch.full((4,), 1e6), X * 5, torch.full((4,), 1e6)])[4:68]
    for x in (X, X * 3, X * 0.5, X * 7, inside):
        found, expected = call(x), function(x)
        assert all(map(torch.equal, found, expected))
    assert [one.__name__ for one in put] == ["plan"]


def test_a_result_may_be_filled_by_torch_alone(posed: Posed) -> None:
    function = lambda x: [torch.mul(x, 3.0, out=torch.empty_like(x))]  # noqa: E731
    plan = plans.planned(function, (X,))[1]
    assert plan.reason == ""
    assert torch.equal(plan.made()(X + 1)[0], (X + 1) * 3)


def test_memory_is_allocated_in_the_form_of_the_result(posed: Posed) -> None:
    """A view costs as much as an allocation; a second form, or a part, is one still."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        first, second, third = (scaled(x, factor) for factor in (2.0, 3.0, 4.0))
        return [first.view(4, 16), second.view(8, 8), second.view(2, 32), third[:32]]

    plan = plans.planned(function, (X,))[1]
    assert plan.source.count("empty(") == 3
    assert [plan.source.count(view) for view in (".view(", ".as_strided(")] == [1, 1]
    for one, expected in zip(plan.made()(X), function(X), strict=True):
        assert torch.equal(one, expected)
        assert one.stride() == expected.stride()


def test_memory_that_is_read_for_its_shape_alone_is_not_allocated(posed: Posed) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        shape = x.new_empty((4, 0)).shape
        return [scaled(x, float(shape[0]))]

    plan = plans.planned(function, (X,))[1]
    assert plan.source.count("empty(") == 1
    assert torch.equal(plan.made()(X + 1)[0], (X + 1) * 4)


def test_views_are_made_by_the_method_that_takes_least(posed: Posed) -> None:
    """Those of an argument too, which may begin anywhere in its memory."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [torch.mm(x.view(8, 8), w.t()), torch.mm(w.t(), x.view(2, 4, 8).flatten(0, 1))]

    def turned(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [torch.mm(x.view(8, 8).t(), w[:, ::2])]

    plan = plans.planned(function, (X, X.view(8, 8) * 2))[1]
    assert "as_strided" not in plan.source
    inside = torch.arange(256.0)
    for x, w in ((X + 1, X.view(8, 8) + 3), (inside[4:68], inside[100:164].view(8, 8))):
        found, expected = plan.made()(x, w), function(x, w)
        assert all(map(torch.equal, found, expected))
        assert [one.stride() for one in found] == [one.stride() for one in expected]
        other = plans.planned(turned, (X, X.view(8, 8) * 2))[1]
        assert torch.equal(other.made()(x, w)[0], turned(x, w)[0])


@pytest.mark.parametrize("operator", plans.DIRECT, ids=str)
def test_a_function_in_place_of_an_operator_calls_that_one(operator: Any) -> None:
    called: list[Any] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            called.append((func, kwargs or {}))
            return func(*args, **(kwargs or {}))

    tensors = [one for one in operator._schema.arguments if str(one.type) == "Tensor"]
    given = [torch.ones(2, 2) for one in tensors if not one.kwarg_only]
    named = {one.name: torch.ones(2, 2) for one in tensors if one.kwarg_only}
    with See():
        plans.DIRECT[operator](*given, **named)
    assert [func for func, _ in called] == [operator]
    assert called[0][1].keys() == named.keys()


def test_memory_is_freed_after_the_last_step_that_needs_it(posed: Posed) -> None:
    """As the function frees it: a plan takes no more memory at its peak."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        kept = scaled(x, 3.0)
        for _ in range(4):
            x = scaled(x, 2.0)
        return [kept[:32], x]

    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = torch.empty_strided(*args, **kwargs)
        made.append(weakref.ref(tensor))
        alive.append(sum(one() is not None for one in made))
        return tensor

    plan = plans.planned(function, (X,))[1]
    plan.names["empty"] = empty
    assert all(map(torch.equal, plan.made()(X), function(X)))
    assert alive == [1, 2, 3, 3, 3]


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


def test_memory_between_steps_is_not_shared(posed: Posed) -> None:
    """Tensors that die in the function are seen with their own memory, though it is free again."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(50):
            scaled(x, 3.0)  # free at once
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
