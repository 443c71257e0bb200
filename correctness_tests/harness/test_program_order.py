"""Programs in another order, and interleaved: what depends on it is named, what may run so passes.

Each kernel sums rows of x into one, in a way that real kernels use; the fault is a constant.
"""

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support import tried
from correctness_tests.support.saboteurs import EAGER
from tinyllama.harness.correct.checks import Finding, Outcome, Rank, programs
from tinyllama.harness.kernels import jit, tl
from tinyllama.harness.kernels.programs import NAMES, EndlessError, Order, ordered
from tinyllama.ops import OPS

ROWS, D = 70, 8  # more programs than run at a time


@jit
def locked(x, y, lock, D: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As in Triton's tutorial on layer norm: the lock is released behind a barrier."""
    at = tl.arange(0, D)
    row = tl.load(x + tl.program_id(0) * D + at)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(y + at, tl.load(y + at) + row)
    if RIGHT:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@jit
def last_adds_up(x, y, scratch, count, D: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program that counts itself last sums what the others stored."""
    at = tl.arange(0, D)
    row = tl.program_id(0)
    tl.store(scratch + row * D + at, tl.load(x + row * D + at))
    if RIGHT:
        tl.debug_barrier()
    if tl.atomic_add(count, 1) == tl.num_programs(0) - 1:
        total = tl.zeros((D,), tl.float32)
        for other in range(tl.num_programs(0)):
            total += tl.load(scratch + other * D + at)
        tl.store(y + at, total)


@jit
def first_clears(x, y, D: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """y is zero already; where the first program clears it, others may have added to it."""
    at = tl.arange(0, D)
    row = tl.program_id(0)
    if not RIGHT:
        tl.store(y + at, tl.zeros((D,), tl.float32), mask=(at < D) & (row == 0))
    tl.atomic_add(y + at, tl.load(x + row * D + at))


@jit
def adding(x, y, D: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, D)
    row = tl.load(x + tl.program_id(0) * D + at)
    if RIGHT:
        tl.atomic_add(y + at, row)
    else:
        tl.store(y + at, tl.load(y + at) + row)


@jit
def in_order(x, y, turn, D: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program waits for the one before it; wrong: for one that is not there."""
    at = tl.arange(0, D)
    row = tl.program_id(0)
    expected = row if RIGHT else row - 1
    while tl.atomic_add(turn, 0) != expected:
        pass
    tl.store(y + at, tl.load(y + at) + tl.load(x + row * D + at))
    tl.debug_barrier()
    tl.atomic_add(turn, 1)


def summed(kernel: Any, right: bool) -> torch.Tensor:
    """The sum over rows of ROWS rows of ones."""
    x, y = torch.ones(ROWS, D), torch.zeros(D)
    counters = {
        name: torch.zeros(1, dtype=torch.int32)
        for name in ("lock", "count", "turn")
        if name in kernel.arg_names
    }
    if "scratch" in kernel.arg_names:
        counters["scratch"] = torch.zeros(ROWS, D)
    kernel[(ROWS,)](x, y, **counters, D=D, RIGHT=right)
    return y


KERNELS = (locked, last_adds_up, first_clears, adding)
SEEN = {  # the orders in which the fault of each shows
    "locked": {"interleaved"},
    "last_adds_up": {"interleaved"},
    "first_clears": {"reversed", "shuffled"},
    "adding": {"interleaved"},
}


@pytest.mark.parametrize("kernel", [*KERNELS, in_order], ids=lambda one: one.fn.__name__)
@pytest.mark.parametrize("order", NAMES)
def test_a_right_sum_is_right_in_every_order(kernel: Any, order: str) -> None:
    with ordered(Order(order)) as launched:
        assert torch.equal(summed(kernel, right=True), torch.full((D,), float(ROWS)))
    assert list(launched) == [f"test_program_order.{kernel.fn.__name__}"]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one.fn.__name__)
def test_a_wrong_sum_is_right_in_turn_and_wrong_in_its_order(kernel: Any) -> None:
    right = torch.full((D,), float(ROWS))
    assert torch.equal(summed(kernel, right=False), right)
    wrong = set()
    for order in NAMES:
        with ordered(Order(order)):
            if not torch.equal(summed(kernel, right=False), right):
                wrong.add(order)
    assert wrong == SEEN[kernel.fn.__name__]


@pytest.mark.parametrize("order", NAMES)
def test_programs_that_wait_for_each_other_end(order: str) -> None:
    with (
        ordered(Order(order)),
        pytest.raises(Exception, match="programs wait for each other") as raised,
    ):
        summed(in_order, right=False)
    assert isinstance(raised.value.__cause__, EndlessError)


@jit
def fails(x, y, D: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(y, tl.load(x))
    tl.debug_barrier()
    if tl.program_id(0) == 3:
        tl.load(x).nothing  # noqa: B018
    tl.store(y + 1, tl.load(x))


def test_no_thread_of_a_program_is_left_after_an_error() -> None:
    before = set(threading.enumerate())
    with ordered(Order("interleaved")), pytest.raises(Exception, match="nothing"):
        summed(fails, right=False)
    assert set(threading.enumerate()) <= before


def test_only_the_kernel_that_is_named_is_reordered() -> None:
    right = torch.full((D,), float(ROWS))
    with ordered(Order("reversed", kernel="test_program_order.adding")) as launched:
        assert torch.equal(summed(first_clears, right=False), right)
    assert list(launched) == ["test_program_order.first_clears"]


# -- the check ------------------------------------------------------------------------------------


@jit
def added_rows(x, y, N, BLOCK: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Half of each element, added twice; two kinds of programs for each block."""
    program = tl.program_id(0)
    at = program // 2 * BLOCK + tl.arange(0, BLOCK)
    half = tl.load(x + at, mask=at < N, other=0.0) * 0.5
    if RIGHT:
        tl.atomic_add(y + at, half, mask=at < N)
    else:
        tl.store(y + at, tl.load(y + at, mask=at < N) + half, mask=at < N)


def finding(call: Callable[..., Any], check: str = "program order", **traits: Any) -> Finding:
    op = OPS["rms_norm"]
    supports = lambda dims: None if dims["D"] in (1, 64) else "another width"  # noqa: E731
    given = {"dtypes": op.dtypes, "supports": supports, "requires": ("triton",), **traits}
    return tried.finding(op, call, check, **given)


def through(right: bool) -> Callable[..., Any]:
    """rms_norm, whose result went through `added_rows` behind `adding`, which is right."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        summed(adding, right=True)
        y = EAGER["rms_norm"](x, weight, eps)
        copy = torch.zeros_like(y, dtype=torch.float32)
        source = y.detach().float().contiguous()
        added_rows[(2 * -(-y.numel() // 4),)](source, copy, y.numel(), BLOCK=4, RIGHT=right)
        return y + (copy - source).to(y.dtype)

    return call


def test_a_result_that_needs_an_order_fails_and_names_its_kernel() -> None:
    found = finding(through(right=False), races={"test_program_order.added_rows": "no harm"})
    assert (found.outcome, found.rank) == (Outcome.FAILED, Rank.UNSAFE), found
    where = f"{__file__}:{added_rows.fn.__code__.co_firstlineno}"
    kernel = f"test_program_order.added_rows ({where})"
    assert found.message.startswith(f"{kernel}, programs interleaved: y: ")
    passed = finding(through(right=True))
    assert passed.outcome is Outcome.PASSED, passed


@jit
def mixed(sums, values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(values + tl.program_id(0))
    tl.atomic_add(sums + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) + value)


def of_any_order(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm, times a sum in float32 over the right sum: a sum's bits depend on its order."""
    values = torch.tensor([2.0 ** (7 * n % 13) * n**0.5 for n in range(20)])
    sums = torch.zeros(4)
    mixed[(20,)](sums, values, BLOCK=4)
    factor = sums[0].double() / values.double().sum()
    return EAGER["rms_norm"](x.double(), weight.double(), eps).mul(factor).to(x.dtype)


def test_other_bits_are_advice_and_none_where_they_are_declared() -> None:
    found = finding(of_any_order)
    assert found.rank is Rank.ADVICE, found
    assert found.message.startswith("test_program_order.mixed (")
    declared = finding(of_any_order, deterministic=frozenset({"cpu"}))
    assert declared.outcome is Outcome.PASSED, declared


def test_other_bits_in_one_order_hide_no_wrong_result_in_another() -> None:
    def both(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The first shows in each order, the second when programs are interleaved."""
        late = through(right=False)(x, weight, eps) - EAGER["rms_norm"](x, weight, eps)
        return of_any_order(x, weight, eps) + late

    found = finding(both, races={"test_program_order.added_rows": "no harm"})
    assert found.rank is Rank.UNSAFE, found
    assert "programs interleaved: " in found.message


def test_a_kernel_that_launches_nothing_says_so() -> None:
    found = finding(EAGER["rms_norm"])
    assert found.outcome is Outcome.UNSUPPORTED
    assert "launches no kernel" in found.message


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("racing", [0, 1, 2, None])
def test_races_are_looked_for_in_each_plain_case_of_the_first_dtype(
    racing: int | None, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [SimpleNamespace(name=name, dtype=torch.float32) for name in range(3)]
    half = SimpleNamespace(name="half", dtype=torch.float16)
    ran: list[Any] = []

    class Seen:
        def __init__(self) -> None:
            self.races: dict[str, str] = {}
            self.places, self.watch = {"kernel": "it.py:3"}, None

        def close(self) -> None:
            if ran[-1].name == racing:
                self.races["kernel"] = "3 addresses"

    candidate: Any = SimpleNamespace(
        plain=lambda: iter([half, *cases]),
        dtypes=(torch.float32, torch.float16),
        inputs=lambda case: case,
        shielded=lambda: SimpleNamespace(results=ran.append),
        provider=SimpleNamespace(races={"kernel": "equal values"} if declared else {}),
    )
    monkeypatch.setattr(programs, "Stores", Seen)
    monkeypatch.setattr(programs, "interpreted", lambda candidate: None)
    monkeypatch.setattr(programs, "watched", lambda watch: contextlib.nullcontext())
    problem: Any = programs.races(candidate)
    if racing is None or declared:
        assert (problem, ran) == (None, cases)
    else:
        assert problem is not None
        case, text = problem
        assert (case, ran) == (cases[racing], cases[: racing + 1])
        assert text.startswith("kernel (it.py:3): two programs of a launch store to 3 addresses;")
