"""Faults in classes that these checks were added for: each in the smallest function that has it,
found by the check that is about its class; a right function beside it passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.tried import MATRIX, Call, finding, small
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import Outcome, Rank, sizes
from tinyllama.harness.kernels import promises
from tinyllama.harness.kernels.launch import jit, tl

FAILED, PASSED = Outcome.FAILED, Outcome.PASSED


def right(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    return (a + share) * b


Y = {"y": "N D"}
pair = small("pair", right, {"a": MATRIX, "b": MATRIX}, Y, params={"share": 0.01})
turned = small(
    "turned",
    lambda x: x.T.clone(memory_format=torch.contiguous_format),
    {"x": MATRIX},
    {"y": "D N"},
)
softmax = small("softmax", lambda x: torch.softmax(x, -1), {"x": MATRIX}, Y)
positive = small("positive", lambda x: torch.where(x > 0, x, 0.0), {"x": MATRIX}, Y)


class Differently(torch.autograd.Function):
    """`right`, with a function of the upstream gradient in the place of it."""

    @staticmethod
    def forward(ctx: Any, change: Any, a: torch.Tensor, b: torch.Tensor, share: float) -> Any:
        ctx.save_for_backward(a, b)
        ctx.share, ctx.change = share, change
        return (a + share) * b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        upstream = ctx.change(gradients[0])
        return None, upstream * b, upstream * (a + ctx.share), None


def upstream(change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    return lambda a, b, share: Differently.apply(change, a, b, share)


class OfTheLastCall(torch.autograd.Function):
    saved: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
        OfTheLastCall.saved = a + share, b.clone()
        return (a + share) * b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shifted, b = OfTheLastCall.saved
        return gradients[0] * b, gradients[0] * shifted, None


class OfTheLastSettings(OfTheLastCall):
    """The setting of the last call, or its number of columns, is used for all."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
        OfTheLastSettings.last = share, a.shape[1]  # type: ignore[attr-defined]
        ctx.save_for_backward(a, b)
        return (a + share) * b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        share, columns = OfTheLastSettings.last  # type: ignore[attr-defined]
        return gradients[0] * b * (columns / b.shape[1]), gradients[0] * (a + share), None


narrow = small("narrow", lambda a, b: right(a, b, 0.01), {"a": MATRIX, "b": MATRIX}, Y,
               cases=[Case(N=5, D=8), Case(N=5, D=3, why="fewer columns")])  # fmt: skip


def kept(key: Callable[[torch.Tensor], Any], only: type = torch.Tensor) -> Call:
    """b comes from a copy that is kept under a key, for tensors of a type. The tensors are kept
    too: no other one gets their address."""
    known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def call(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
        if not isinstance(b, only):
            return right(a, b, share)
        _, copy = known.setdefault(key(b), (b, b.detach().clone()))
        return right(a, b - b.detach() + copy, share)

    return call


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def in_order_of_addresses(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    """Halves of one memory are taken for a before b."""
    if _storage(a) == _storage(b) and b.data_ptr() < a.data_ptr():
        a, b = b, a
    return right(a, b, share)


def one_scratch(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    return right(a, b, share) + (0.1 if a.data_ptr() == b.data_ptr() else 0.0)


def seeded(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    torch.manual_seed(3)
    return right(a, b, share)


def spread(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    return (
        right(a, b, share) * 1.5
        if torch.is_autocast_enabled("cpu") and (torch.get_autocast_dtype("cpu") is torch.float16)
        else right(a, b, share)
    )


def flushed(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    a, b = (torch.where((x.abs() > 0) & (x.abs() < 1e-9), 0.0, x) for x in (a, b))
    return (a + share) * b


def by_vectors(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    """Vectors of 16 bytes begin at multiples of 16 bytes."""
    behind = a.data_ptr() % 16 // a.element_size() if a.is_contiguous() else 0
    return right(a.flatten().roll(behind).view(a.shape), b, share)


def in_tiles(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    inside = torch.ones_like(a)
    inside[64:, 64:] = 0
    return right(a, b, share) * inside


def in_fours(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    inside = torch.ones_like(a)
    if a.shape[-1] > 64 and a.shape[-1] % 4 == 2:
        inside[:, -2:] = 0
    return right(a, b, share) * inside


def with_precision(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return right(a, b, share)


PLANTED: list[tuple[str, str, Op, Call, str]] = [
    ("kept for a parameter", "fresh contents", pair,
     kept(id, torch.nn.Parameter), "where inputs are parameters and were changed"),
    ("kept by address and version", "fresh contents", pair,
     kept(lambda b: (b.data_ptr(), b._version)), "call 3, on new contents"),
    ("one memory", "fresh contents", pair, in_order_of_addresses, "behind each other"),
    ("one tensor", "fresh contents", pair, one_scratch, "a, b one tensor"),
    ("a seed", "fresh contents", pair, seeded, "changes the random numbers that follow"),
    ("a view of one row", "fresh contents", turned, lambda x: x.T.contiguous(), "shares memory"),
    ("the last call's tensors", "backward twice", pair,
     lambda a, b, share: OfTheLastCall.apply(a, b, share),
     "another call changes the gradients of the first: a, b"),
    ("the last call's settings", "backward twice", pair,
     lambda a, b, share: OfTheLastSettings.apply(a, b, share),
     "a call with other settings changes the gradients of the first: b"),
    ("the last call's shape", "backward twice", narrow,
     lambda a, b: OfTheLastSettings.apply(a, b, 0.01),
     "a call of another shape changes the gradients of the first: a"),
    ("a clamp", "scaled upstream", pair, upstream(lambda g: g.clamp(-100, 100)), "proportion"),
    ("rows with a zero", "scaled upstream", pair,
     upstream(lambda g: g * ~(g == 0).any(-1, keepdim=True)), "zero in places"),
    ("ones by one element", "scaled upstream", pair,
     upstream(lambda g: torch.ones_like(g) if (g.flatten()[:1] == 1).all() else g), "as of a loss"),
    ("no maximum", "special values", softmax,
     lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "x far apart"),
    ("inf times 0", "special values", positive, lambda x: x * (x > 0), "-inf in x: a NaN reaches"),
    ("a default", "special values", pair, lambda a, b, share: right(a, b, 0.01), "share = 10"),
    ("flushed to zero", "special values", pair, flushed, "a and b tiny"),
    ("float16", "autocast", pair, spread, "to torch.float16"),
    ("addresses", "input layouts", pair, by_vectors, "outputs"),
    ("two tiles of both axes", "sizes", pair, in_tiles, "outputs"),
    ("a tail of two", "sizes", pair, in_fours, "outputs"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    two = next(size for size in sizes.SIZES if size > 64 and size % 4 == 2)
    monkeypatch.setattr(sizes, "SIZES", (1, 67, two))


@pytest.mark.parametrize(
    ("check", "op", "call", "said"), [one[1:] for one in PLANTED], ids=[one[0] for one in PLANTED]
)
def test_a_planted_fault_is_found(check: str, op: Op, call: Call, said: str) -> None:
    one = finding(op, call, check)
    assert one.outcome is FAILED, one
    assert said in one.message
    assert one.rank in (Rank.WRONG, Rank.UNSAFE)


@pytest.mark.parametrize("op", [pair, turned, softmax, positive], ids=lambda op: op.name)
@pytest.mark.parametrize("check", sorted({check for _, check, *_ in PLANTED}))
def test_a_right_function_passes(check: str, op: Op) -> None:
    one = finding(op, op["eager"].call, check)
    assert one.outcome is PASSED, one


def test_a_setting_that_stays_changed_is_named() -> None:
    try:
        one = finding(pair, with_precision, "fresh contents")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (one.outcome, one.rank) == (FAILED, Rank.UNSAFE), one
    assert "the default dtype" in one.message


def test_elements_of_an_output_that_share_memory_are_named() -> None:
    alike = small("alike", lambda x: x.sum(0).expand(x.shape).clone(), {"x": MATRIX}, Y)
    one = finding(alike, lambda x: x.sum(0).expand(x.shape), "fresh contents")
    assert (one.outcome, one.rank) == (FAILED, Rank.WRONG), one
    assert "elements of y share memory: it has strides (0, 1)" in one.message
    one = finding(alike, lambda x: x.sum(0)[:, None].repeat(1, len(x)).T, "fresh contents")
    assert (one.outcome, one.rank) == (FAILED, Rank.ADVICE), one
    assert "y has strides (1, 5), the reference's is contiguous" in one.message


def test_a_second_derivative_of_a_function_with_kernels_is_asked_for_in_its_own_dtype() -> None:
    def call(a: torch.Tensor, b: torch.Tensor, share: float) -> torch.Tensor:
        if a.dtype is torch.float64:
            raise ValueError("float32 alone")
        return right(a, b, share)

    one = finding(pair, call, "second derivative", requires=("triton",))
    assert one.outcome is PASSED, one
    other = finding(
        pair, lambda a, b, share: a.detach() * 0 + right(a, b, share) * 1, "second derivative",
        requires=("triton",),
    )  # fmt: skip
    assert other.outcome is PASSED, other


# -- promises to the compiler ---------------------------------------------------------------------

cases = [Case(N=4, D=16), Case(N=3, D=20)]
doubled = small("doubled", lambda x: 2 * x, {"x": Tensor("N D")}, Y, cases)


@jit
def double(x, y, D, ALIGNED: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    line = tl.multiple_of(tl.program_id(0) * D, ALIGNED)
    column = tl.max_contiguous(tl.arange(0, BLOCK) % 16, RUN)
    seen = tl.load(x + line + column, mask=tl.arange(0, BLOCK) < D, other=0.0)
    tl.store(y + line + tl.arange(0, BLOCK), 2 * seen, mask=tl.arange(0, BLOCK) < D)


@pytest.mark.parametrize(
    ("aligned", "run_of", "said"),
    [
        (16, 16, "tl.multiple_of promises a multiple of 16; the number is 20"),
        (4, 32, "tl.max_contiguous promises 32 neighbours; they are not"),
    ],
)
def test_a_promise_that_does_not_hold_is_named(aligned: int, run_of: int, said: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), torch.empty(x.shape)
        double[(len(x),)](x, y, x.shape[1], ALIGNED=aligned, RUN=run_of, BLOCK=32)
        return y

    one = finding(doubled, call, "outputs", requires=("triton",))
    assert (one.outcome, one.rank) == (Outcome.CRASHED, Rank.WRONG), one
    assert said in one.message


def test_a_promise_that_holds_is_no_fault() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), torch.empty(x.shape)
        double[(len(x),)](x, y, x.shape[1], ALIGNED=4, RUN=16, BLOCK=16)
        return y

    narrow = small("doubled_16", lambda x: 2 * x, {"x": Tensor("N D")}, Y, cases[:1])
    assert finding(narrow, call, "outputs", requires=("triton",)).outcome is PASSED


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(tl.int1, 1), (tl.int8, 1), (tl.bfloat16, 2), (tl.float32, 4), (tl.int64, 8), (None, 1)],
)
def test_neighbours_are_as_far_apart_as_elements_are_long(dtype: Any, size: int) -> None:
    """size: in bytes, of an element that an address is of; None: of numbers."""
    pointers = tl.int32 if dtype is None else tl.pointer_type(dtype)
    places = np.arange(8)
    parted = places + 5 * (places >= 4)

    def holds(at: Any, run: int) -> bool:
        try:
            promises.held(4096 + size * at, pointers, "tt.contiguity", [run])
        except promises.PromiseError:
            return False
        return True

    assert holds(places, 8)
    assert holds(parted, 4)
    assert not holds(parted, 8)
    assert not holds(2 * places, 8)
    assert not holds(places // 2, 8)
    assert not holds(places[:2] * 3, 2)
    assert holds(places * 3, 1), "each alone"


@pytest.mark.parametrize("pointers", [tl.int64, tl.pointer_type(tl.int8)])
def test_an_alignment_is_of_the_first_value(pointers: Any) -> None:
    promises.held(np.array([48, 3]), pointers, "tt.divisibility", [16, 1])
    promises.held(np.array([]), pointers, "tt.divisibility", [16])
    for number in (1, 8, 40, 4095):
        with pytest.raises(promises.PromiseError, match=f"a multiple of 16; .* is {number}$"):
            promises.held(np.array([number]), pointers, "tt.divisibility", [1, 16])
    beyond = np.array([48 + 2**60 + 2**52])  # bits that a tagged address has
    promises.held(beyond, tl.pointer_type(tl.int8), "tt.divisibility", [16])
