"""Each axis in turn made long and ragged: what goes wrong only there is found, what is not tried
is said."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.narrowed import narrowed
from correctness_tests.support.tried import finding, small
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, resizing, sizes
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.ops import OPS

SILU = OPS["silu_mul"]
EAGER = SILU["eager"].call
Call = Callable[..., Any]
WHOLE = tuple(size for size in sizes.SIZES if size % 64 == 0)


@pytest.fixture(autouse=True)
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    most = (4099, 65539) if "rows" in request.fixturenames else (259, 1027, 4099)
    monkeypatch.setattr(sizes, "SIZES", (67, *most))


def round_sizes(op: Op) -> Op:
    """The op as an author would declare it who only thinks of blocks that are full."""
    return narrowed(op, [Case(N=64, F=64), Case(N=8, F=128)])


def found(call: Call, op: Op = SILU, **traits: Any) -> Finding:
    return finding(op, call, "sizes", **traits)


def beyond(rows: int, wrong: Call = torch.zeros_like) -> Call:
    """silu_mul, wrong from a row on."""

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = EAGER(gate, up)
        return torch.cat([y[:rows], wrong(y[rows:])])

    return call


def no_tail(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The last block of a row is left out where it is not full."""
    y = EAGER(gate, up)
    full = y.shape[-1] // 64 * 64 if y.shape[-1] > 64 else y.shape[-1]
    return torch.cat([y[..., :full], y[..., full:] * 0], -1)


def test_what_is_right_passes_and_says_how_far() -> None:
    one = found(EAGER)
    assert one.outcome is Outcome.PASSED, one
    assert one.message.startswith("N up to 4,099; F up to 4,099; the last 64 of ")


@pytest.mark.parametrize(
    ("by", "others", "good"),
    [
        (1.5, {"torch": 1.2}, True),
        (1.5, {"torch": 1.0}, False),
        (4.0, {"torch": 1.2}, False),
        (1.5, {"another": 1.2}, False),
        (1.5, {}, False),
    ],
    ids=["as torch", "torch is right", "much more than torch", "as no code of torch", "no other"],
)
@pytest.mark.parametrize(
    "there",
    [
        lambda x: len(x) > 4096,
        lambda x: len(x) > 4096 and x.dtype is torch.float16,
        lambda x: x.shape == (sizes.BOTH, sizes.BOTH),
    ],
    ids=["along an axis", "in another dtype", "along two axes"],
)
def test_a_size_at_which_torch_is_as_wrong_tells_nothing(
    by: float, others: dict[str, float], good: bool, there: Call
) -> None:
    """Where a long axis makes results so sensitive that none is right."""

    def off(factor: float) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            return 2 * x * (factor if there(x) else 1.0)

        return call

    op = small("sensitive", lambda x: 2 * x, {"x": Tensor("N D")}, {"y": "N D"})
    op.dtypes = (torch.float32, torch.float16)
    for name, factor in others.items():
        op.provider(name)(off(factor))
    one = finding(op, off(by), "sizes", dtypes=op.dtypes)
    assert one.outcome is (Outcome.PASSED if good else Outcome.FAILED), one


MANY = pytest.mark.slow("65,539 rows: eight seconds")


@pytest.mark.parametrize(
    ("rows", "size", "wrong"),
    [
        (4096, 4099, torch.zeros_like),
        (4096, 4099, lambda y: y * 1.1),
        pytest.param(65535, 65539, lambda y: y * 1.1, marks=MANY),
    ],
    ids=["zeros", "factor", "factor-of-many"],
)
def test_rows_beyond_a_limit_are_compared(rows: int, size: int, wrong: Call) -> None:
    one = found(beyond(rows, wrong))
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert f"N{size}" in one.case
    assert one.message.startswith("outputs: h: ")


def test_a_ragged_tail_is_tried_whatever_is_declared() -> None:
    op = round_sizes(SILU)
    assert finding(op, no_tail, "outputs", dtypes=op.dtypes).outcome is Outcome.PASSED
    one = found(no_tail, op)
    assert one.outcome is Outcome.FAILED, one
    assert "F65" in one.case


@pytest.mark.parametrize("block", [64, 128, 256, 512, 1024])
def test_an_odd_number_of_whole_blocks_is_tried(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """A loop that takes two blocks in each turn, with a tail only where the last is not full."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        odd = y.shape[-1] > block and y.shape[-1] % (2 * block) == block
        return torch.cat([y[..., :-block], y[..., -block:] * 0], -1) if odd else y

    monkeypatch.setattr(sizes, "SIZES", WHOLE)
    one = found(call, small("paired", lambda x: 2 * x, {"x": Tensor("N D")}, {"y": "N D"}))
    assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
    assert f"D{3 * block}" in one.case


def test_extreme_values_are_tried_on_a_ragged_tail() -> None:
    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = EAGER(gate, up)
        far = bool(gate.abs().max() > 20) and gate.shape[-1] % 64 > 0
        return torch.cat([y[..., :-1], y[..., -1:] * 0], -1) if far else y

    op = round_sizes(SILU)
    assert op.extremes
    one = found(call, op)
    assert one.outcome is Outcome.FAILED, one
    assert any(extreme in one.case for extreme in op.extremes)
    assert "259" in one.case


def raising(kind: type[Exception]) -> Call:
    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if len(gate) > 2000:
            raise kind("no more than 2000 rows")
        return EAGER(gate, up)

    return call


def of_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return EAGER(gate, up).view(-1, 64) if len(gate) > 2000 else EAGER(gate, up)


@pytest.mark.parametrize(
    ("call", "rank"),
    [
        (raising(ValueError), Rank.CONTRACT),
        (raising(RuntimeError), Rank.CONTRACT),
        (raising(ArithmeticError), Rank.WRONG),
        (of_torch, Rank.WRONG),
    ],
)
def test_a_size_that_is_refused_is_no_wrong_result(call: Call, rank: Rank) -> None:
    one = found(call)
    assert one.rank is rank, one
    assert "N2001" in one.case  # a number that the code compares with, and one more


def test_a_size_that_is_refused_hides_no_wrong_one_along_another_axis() -> None:
    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return no_tail(gate, up) if len(gate) <= 2000 else raising(ValueError)(gate, up)

    one = found(call, round_sizes(SILU))
    assert one.rank is Rank.WRONG, one
    assert "F65" in one.case


def test_what_a_provider_does_not_support_is_said() -> None:
    def supports(dims: Any) -> str | None:
        return None if dims["N"] <= 1100 and dims["F"] <= 64 else "too large"

    one = found(EAGER, round_sizes(SILU), supports=supports)
    assert one.outcome is Outcome.PASSED, one
    assert one.message == (
        "N up to 1,027 (4,099 is not supported); F not tried (67 is not supported)"
    )
    none = found(EAGER, round_sizes(SILU), supports=lambda dims: None if dims["N"] < 65 else "no")
    assert none.outcome is Outcome.PASSED
    only = found(EAGER, round_sizes(SILU), supports=lambda d: None if max(d.values()) < 65 else "")
    assert only.outcome is Outcome.UNSUPPORTED, only
    assert "N not tried" in only.message


def test_rules_are_given_numbers_where_the_case_has_several_axes() -> None:
    op = narrowed(SILU, [Case(N=(2, 3), F=64)])
    op.fits = lambda sizes: None if sizes["N"] <= 3300 else "too many"
    one = found(EAGER, op, supports=lambda dims: None if dims["F"] <= 300 else "too wide")
    assert one.outcome is Outcome.PASSED, one
    assert one.message == (
        "N up to 1,027 (4,099 is not supported); F up to 259 (1,027 is not supported)"
    )


def test_a_reference_that_takes_no_such_size_is_no_fault() -> None:
    op = round_sizes(SILU)
    op.providers = {**op.providers, "eager": Provider(op.name, "eager", raising(ValueError), ())}
    one = found(EAGER, op)
    assert one.outcome is Outcome.PASSED, one
    assert "the reference does not take 4,099: no more than 2000 rows" in one.message


def test_a_size_may_take_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sizes, "time", SimpleNamespace(thread_time=lambda: now[0]))

    def slow(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        now[0] += len(gate) * 1e-2
        return EAGER(gate, up)

    one = found(slow, round_sizes(SILU))
    assert "N up to 259 (1,027 would take more than 10 s)" in one.message, one


def eight(dims: Any) -> str | None:
    return None if dims["D"] == 8 else "other columns"


@jit
def copy_kernel(x, y, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tl.store(y + row * D + at, tl.load(x + row * D + at, mask=at < D, other=0.0), mask=at < D)


@jit
def copy_parts_kernel(x, y, D, BLOCK: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(AXIS).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + row * D + at, tl.load(x + row * D + at, mask=at < D, other=0.0), mask=at < D)


@pytest.mark.parametrize(
    ("most", "axis", "seen"),
    [
        (None, 0, ""),
        (65535, 0, "the last entry along N of y is wrong or never written"),
        (65535, 1, "the last entry along N of y is wrong or never written"),
        (65535, 2, "the last entry along N of y is wrong or never written"),
        (None, 1, "a grid of 65,539 programs along the second axis"),
        (None, 2, "a grid of 65,539 programs along the third axis"),
    ],
)
def test_the_last_row_is_asked_for_where_all_would_take_too_long(
    most: int | None, axis: int, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """most: programs along an axis, as an author limits them who knows what a GPU takes."""
    monkeypatch.setattr(sizes, "SIZES", (67, 65539))
    monkeypatch.setattr(sizes, "SECONDS", 0.0)
    x, y = {"x": Tensor("N D")}, {"y": "N D"}
    copied = small("copied", lambda x: x.clone(), x, y, [Case(N=5, D=8)])

    def call(x: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), torch.empty_like(x)
        rows = min(len(x), most or len(x))
        if axis == 0:
            copy_kernel[(rows,)](x, y, x.shape[1], BLOCK=16)
        else:
            grid = (2, rows) if axis == 1 else (2, 1, rows)
            copy_parts_kernel[grid](x, y, x.shape[1], BLOCK=4, AXIS=axis)
        return y

    one = finding(copied, call, "sizes", requires=("triton",), supports=eight)
    if not seen:
        assert one.outcome is Outcome.PASSED, one
        assert "more than 0 s, but the last entry of 65,539 is right)" in one.message
    else:
        assert (one.outcome, one.rank) == (Outcome.FAILED, Rank.WRONG), one
        assert seen in one.message


@pytest.mark.parametrize("known", [None, False, True])
def test_a_fault_of_an_extreme_alone_may_be_excused(
    known: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """known: whether the reference fails on the extreme as well; None: the fault has none."""
    asked: list[str | None] = []

    def faults(candidate: Candidate, case: OpCase, refusable: bool) -> Iterator[Finding]:
        if (case.extreme is None) is (known is None):
            yield Finding("outputs", Outcome.FAILED, str(case), "wrong")

    def excused(candidate: Candidate, case: OpCase, fault: Finding | None) -> bool:
        asked.append(case.extreme)
        return known is not False

    monkeypatch.setattr(sizes, "faults", faults)
    monkeypatch.setattr(sizes, "excused", excused)
    monkeypatch.setattr(sizes, "SIZES", (sizes.OF_EXTREMES,))
    one = found(EAGER)
    assert None not in asked
    if known:
        assert one.outcome is Outcome.PASSED, one
        assert set(asked) == set(SILU.extremes)
    else:
        assert (one.outcome, one.message) == (Outcome.FAILED, "outputs: wrong")


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,)], ids=len)
def test_the_case_that_is_made_longer_is_the_one_that_is_declared_first(
    place: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Wherever it is by its size: the smallest case, the one between, or the largest."""
    cases = [Case(N=6, F=8), Case(N=6, F=16), Case(N=6, F=24)]
    first = cases.pop(place)
    op = narrowed(SILU, [first, *cases])
    candidate = Candidate(op, Provider(op.name, "tried", EAGER, dtypes))
    base = resizing.general(candidate)
    assert (base.case, base.dtype, base.varied) == (op.cases[0], dtypes[0], False)
    others = Provider(
        op.name,
        "tried",
        EAGER,
        dtypes,
        supports=lambda dims: "not this" if dims["F"] == first.dims["F"] else None,
    )
    assert resizing.general(Candidate(op, others)).case is cases[0]


def test_each_variation_of_each_size_is_tried_along_an_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last extreme, the last gradient and the last layout as well as the first, and a fault
    of each of them is found; but for variations that are wrong at any size."""
    every = (67, sizes.OF_EXTREMES, sizes.OF_LAYOUTS, 4099)
    monkeypatch.setattr(sizes, "SIZES", every)
    tried: list[tuple[Any, ...]] = []
    wrong: tuple[Any, ...] = ()

    def name(case: OpCase) -> tuple[Any, ...]:
        return case.case.dims["N"], case.extreme, case.wanted, case.layout

    def faults(candidate: Candidate, case: OpCase) -> Iterator[Finding]:
        tried.append(name(case))
        if tried[-1] == wrong:
            yield Finding("outputs", Outcome.FAILED, str(case), "wrong")

    monkeypatch.setattr(sizes, "_faults", faults)
    monkeypatch.setattr(sizes, "excused", lambda *_: False)
    op = narrowed(SILU, [Case(N=5, F=8)])
    op.extremes = {name: next(iter(SILU.extremes.values())) for name in ("one", "two", "three")}
    candidate = Candidate(op, Provider(op.name, "tried", EAGER, (torch.float32,)))
    base = resizing.general(candidate)
    plain = base.wanted, base.layout
    of_extremes: list[tuple[Any, ...]] = [(extreme, *plain) for extreme in op.extremes]
    of_extremes += [(None, wanted, base.layout) for wanted in ((), ("gate",), ("up",))]
    of_layouts = [(None, base.wanted, layout) for layout in sizes.LAYOUTS]
    expected: list[tuple[Any, ...]] = [(size, None, *plain) for size in every]
    expected += [(sizes.OF_EXTREMES, *one) for one in of_extremes]
    expected += [(sizes.OF_LAYOUTS, *one) for one in of_layouts]
    assert sizes._along(candidate, base, "N", []) == (4099, "")
    assert sorted(map(str, tried)) == sorted(map(str, expected))
    for wrong in expected:
        assert isinstance(sizes._along(candidate, base, "N", []), Finding), wrong
        left_out = sizes._along(candidate, base, "N", [(*wrong[2:], (), ())])
        assert isinstance(left_out, Finding) is (wrong[2:] == plain), wrong


def test_the_case_that_is_made_longer_tells_what_does_nothing() -> None:
    """The one that is declared first, unless a result of the reference is an input there."""
    x, y = {"x": Tensor("N D")}, {"y": "N D"}
    cases = [Case(N=3, D=8), Case(N=4, D=8), Case(N=5, D=8)]
    op = small("doubled", lambda x: x * (2 if len(x) > 3 else 1), x, y, cases)
    assert resizing.general(Candidate(op, op["eager"])).case is cases[1]


@pytest.mark.parametrize(
    ("tried", "seconds", "last"),
    [
        ((64, 96, 1024), (0.1, 0.4, 1.0), 1024),  # too close together to tell how time grows
        ((64, 128, 1024), (0.1, 0.8, 1.0), 1024),
        ((64, 129, 1024), (0.1, 0.8, 1.0), 129),  # as the cube
        ((64, 256, 1024), (0.4, 0.6, 3.0), 1024),  # at least as the size
        ((64, 256, 1025), (1.0, 2.5, 9.0), 256),
        ((64, 256, 1024), (1.0, 2.5, 9.0), 1024),
    ],
)
def test_time_is_taken_to_grow_as_it_did_from_a_size_to_more_than_twice_that_size(
    tried: tuple[int, ...], seconds: tuple[float, ...], last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.accumulate(one for took in seconds for one in (0.0, took))
    monkeypatch.setattr(sizes, "SIZES", tried)
    monkeypatch.setattr(sizes, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    monkeypatch.setattr(sizes, "_faults", lambda *_: iter(()))
    monkeypatch.setattr(sizes, "last_entry", lambda *_: "")
    candidate = Candidate(SILU, Provider(SILU.name, "tried", EAGER, (torch.float32,)))
    base = resizing.general(candidate)
    found = sizes._along(candidate, base, "N", [])
    assert isinstance(found, tuple)
    assert found[0] == last
