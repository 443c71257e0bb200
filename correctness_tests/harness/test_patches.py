"""The language is changed for the interpreter as Triton does it, found once and then repeated."""

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter as stock
from triton.runtime.jit import mangle_type

from tinyllama.harness.kernels import interpreter, patches
from tinyllama.harness.kernels.launch import jit, recorded, tl
from tinyllama.harness.kernels.resources import compile_launch, lacking


@jit
def exponential(x, y):  # type: ignore[no-untyped-def]
    tl.store(y, tl.exp(tl.load(x)))


@jit
def summed(x, y):  # type: ignore[no-untyped-def]
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, 1))) + tl.exp(tl.load(x)))


@jit
def doubled(x, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(x)
    for _ in range(TIMES):
        a = a + a
    tl.store(x, a)


@jit
def counts(x, y, N, stride):  # type: ignore[no-untyped-def]
    """Each program a share of the rows, counted in both ways."""
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        at = x + row.to(tl.int64) * stride  # type: ignore[attr-defined]
        for column in tl.range(0, 2):
            place = (column.to(row.dtype) + (2 * row).to(tl.int64)).to(row.dtype)  # type: ignore[attr-defined]
            tl.store(y + place, tl.load(at + (column - 1 + 1).to(tl.int64)))


def result(kernel: Any) -> float:
    x, y = torch.ones(1), torch.zeros(1)
    kernel[(1,)](x, y)
    return y.item()


def test_what_is_changed_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function of Triton's library, too, whose module sees another part of the language."""
    for kernel in (exponential, summed, summed):  # Triton adds a name to the library's module
        result(kernel)
    monkeypatch.setattr(patches, "_found", lambda *_: pytest.fail("it was looked for again"))
    assert result(exponential) == pytest.approx(np.e)
    assert result(summed) == pytest.approx(1 + np.e)
    assert not patches._MADE


@pytest.mark.parametrize(
    "owner", [ModuleType("owner"), type("Owner", (), {})], ids=["module", "class"]
)
def test_changes_are_made_and_undone_and_what_was_added_is_removed(owner: Any) -> None:
    owner.one = one = object()
    before, member = dict(vars(owner)), vars(owner).get
    changes = [(owner, "one", one, 2, member), (owner, "more", patches._MISSING, 3, member)]
    for _ in range(2):
        assert patches._do(patches._Changes(changes))
        assert (owner.one, owner.more) == (2, 3)
        patches._undo()
        assert dict(vars(owner)) == before
    owner.more = 4
    assert not patches._do(patches._Changes(changes))
    assert owner.one is one


def test_a_launch_leaves_the_whole_language_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one, which finds what Triton changes; for compilers that come after it."""
    monkeypatch.setattr(patches, "_KNOWN", {})
    owners = [tl, tl.core, tl.math, *filter(inspect.isclass, vars(tl.core).values())]
    before = [dict(vars(owner)) for owner in owners]
    changed: dict[str, int] = {}
    make = patches._Changes.make

    def noted(self: Any) -> None:
        make(self)
        for owner, old in zip(owners, before, strict=True):
            changed.setdefault(owner.__name__, 0)
            changed[owner.__name__] += dict(vars(owner)) != old

    monkeypatch.setattr(patches._Changes, "make", noted)
    for kernel in (summed, exponential):
        result(kernel)
        assert [dict(vars(owner)) for owner in owners] == before
    assert sum(times > 0 for times in changed.values()) > 2, "several are changed meanwhile"


@pytest.mark.parametrize("place", range(3))
def test_a_change_of_each_owner_is_found(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [SimpleNamespace(kept=1, changed=2) for _ in range(3)]

    def patch(function: object) -> None:
        owners[place].changed, owners[place].added = 3, 4

    monkeypatch.setattr(patches, "_OWNERS", owners)
    found = patches._found(patch, Mock())
    assert [(name, before, after) for _, name, before, after, _ in found] == [
        ("changed", 2, 3),
        ("added", patches._MISSING, 4),
    ]
    assert all(owner is owners[place] for owner, *_ in found)


@pytest.mark.parametrize("kernels", [(exponential, summed), (summed, exponential)])
def test_what_was_changed_for_one_launch_stays_changed_for_the_next_inside(
    monkeypatch: pytest.MonkeyPatch, kernels: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(patches, "_KNOWN", {})
    with patches.put_back():
        for kernel in kernels:
            before = [change for made in patches._MADE for change in made.each]
            result(kernel)
            assert before == [one for one in before if one[4](one[1]) is one[3]]
    assert before


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("seen", [(), (tl,), (tl.core,), (tl, tl.core)], ids=len)
def test_a_module_sees_the_language_by_any_of_its_names(
    seen: tuple[Any, ...], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_KNOWN", {})
    monkeypatch.setattr(patches, "_found", lambda *_: [])
    values = [torch, np]
    values[place:place] = seen
    names = {f"name{number}": value for number, value in enumerate(values)}
    patches.patched(FunctionType(result.__code__, names), Mock())
    assert list(patches._KNOWN) == [(tl in seen, tl.core in seen)]


def test_each_change_that_was_made_stays_where_another_module_asks_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of them, the one in the middle and the last, until all are put back."""
    language = SimpleNamespace(a=1, b=2, c=3, d=4)
    now, afters = vars(language), [{"a": 10, "b": 20, "c": 30}, {"d": 40}]
    every = {name: value for after in afters for name, value in after.items()}

    def found(*_: Any) -> list[patches.Change]:
        after = afters.pop(0)
        changes = [(language, name, now[name], value, now.get) for name, value in after.items()]
        now.update(after)
        return changes

    monkeypatch.setattr(patches, "_KNOWN", {})
    monkeypatch.setattr(patches, "_found", found)
    with patches.put_back():
        for names in ({"one": tl}, {"other": tl.core}):
            patches.patched(FunctionType(result.__code__, names), Mock())
        assert now == every
    assert now == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_a_language_that_became_another_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(exponential) == pytest.approx(np.e)
    with monkeypatch.context() as patch:
        patch.setattr(tl, "exp", tl.exp2)
        assert result(exponential) == 2
        assert tl.exp is tl.exp2
    assert result(exponential) == pytest.approx(np.e)


def test_what_a_loop_counts_can_be_cast_as_where_it_compiles() -> None:
    x, y = torch.randn(5, 3), torch.zeros(5, 2)
    counts[(2,)](x, y, 5, 3)
    assert torch.equal(y, x[:, :2])
    assert "range" not in counts.fn.__globals__
    with recorded("sm_90") as launches:
        counts[(2,)](x.to("meta"), y.to("meta"), 5, 3)
    assert lacking("sm_90") or compile_launch(launches[0], "sm_90")


def test_a_launch_inside_of_another_leaves_the_language_to_it() -> None:
    plain = tl.exp
    with patches.put_back():
        assert result(exponential) == pytest.approx(np.e)
        assert tl.exp is not plain
        assert result(exponential) == pytest.approx(np.e)
    assert tl.exp is plain


def test_each_value_that_is_made_is_an_operation_of_a_program() -> None:
    x = torch.zeros(1)
    doubled[(1,)](x, TIMES=300)  # from now on its sum is remembered
    with interpreter.limited(steps=100), pytest.raises(Exception, match="more than 100 operations"):
        doubled[(1,)](x, TIMES=300)
    with interpreter.limited(steps=100):
        doubled[(1,)](x, TIMES=50)
    doubled[(1,)](x, TIMES=300)


INTEGERS = (0, 1, -5, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**40, -(2**40), 2**63)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
TENSORS = tuple(torch.zeros(2, dtype=dtype) for dtype in DTYPES)
PARAMETER = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("time", ["first", "second"])
@pytest.mark.parametrize("argument", [*INTEGERS, True, *TENSORS, PARAMETER], ids=str)
def test_an_argument_has_the_type_that_triton_gives_it(argument: Any, time: str) -> None:
    made = stock._implicit_cvt(argument)
    assert made.type == made.handle.dtype == tl.str_to_ty(mangle_type(argument), None)
    number = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
    assert made.handle.data.tolist() == [number]
    if argument is True:
        return  # triton 3.6 keeps it in 32 bits
    assert made.handle.data.dtype == stock._get_np_dtype(made.type) or number in (2**31, 2**32 - 1)


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    lambda a, b: None,
    lambda a, b=2: None,
    lambda a, *b: None,
    lambda a, **b: None,
    lambda a, *, b=2: None,
)
CALLS: tuple[tuple[tuple[int, ...], dict[str, int]], ...] = (
    ((1, 2), {}),
    ((1,), {"b": 2}),
    ((), {"b": 2, "a": 1}),
    ((1,), {}),
    ((), {}),
    ((1, 2, 3), {}),
    ((1, 2), {"b": 2}),
    ((1,), {"c": 2}),
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: str(inspect.signature(one)))
@pytest.mark.parametrize(("args", "named"), CALLS)
def test_arguments_are_bound_as_python_binds_them(
    function: Callable[..., Any], args: tuple[int, ...], named: dict[str, int]
) -> None:
    def bound(by: Any) -> Any:
        try:
            return by.getfullargspec(function), by.getcallargs(function, *args, **named)
        except TypeError as error:
            return str(error)

    assert stock.inspect is not inspect
    assert bound(stock.inspect) == bound(inspect)
