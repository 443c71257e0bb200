"""Accesses out of bounds and endless loops of interpreted kernels: named before they do harm."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.memory import filled, no_address
from tinyllama.harness import Provider
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, remote, run
from tinyllama.harness.kernels import interpreter
from tinyllama.harness.kernels.bounds import Bounds, Region, tensors_of, watched
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.ops import OPS

OP = OPS["silu_mul"]
PASSED, FAILED, CRASHED = Outcome.PASSED, Outcome.FAILED, Outcome.CRASHED
FAR = 2**40  # elements: no memory of this process
NAME = __name__.rpartition(".")[2]


@jit
def storing(x, out, n, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(out + at + tl.cast(SHIFT, tl.int64), tl.load(x + at, mask=at < n), mask=at < n)


@jit
def adding(x, out, n, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)
    tl.atomic_add(out + at + tl.cast(SHIFT, tl.int64), 1.0, mask=at < n)


@jit
def swapping(x, out, n, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.atomic_cas(out + tl.cast(SHIFT, tl.int64), 0, 1)


@jit
def reading(x, out, n, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(x + tl.cast(SHIFT, tl.int64)))


@jit
def endless(x, out, n, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    while tl.atomic_cas(out, 0, 1) == 0:  # a lock that nobody releases
        tl.store(out, 0)


def beside(kernel: Any, shift: int, wrong: str = "") -> Any:
    """The op, beside a launch that is out of bounds: always, or in one layout."""

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        dtype = torch.int32 if kernel in (swapping, endless) else torch.float32
        out = torch.zeros(8, dtype=dtype)
        shifted = not wrong or gate.stride()[-1] == 2
        kernel[(2,)](torch.ones(8, dtype=dtype), out, 8, SHIFT=shift if shifted else 0)
        return OP["eager"].call(gate, up)

    return call


def candidate(call: Any) -> Candidate:
    provider = Provider(OP.name, "tried", call, dtypes=(torch.float32,), requires=("triton",))
    dims = OP.cases[0].dims
    narrow = replace(provider, supports=lambda given: None if given == dims else "another case")
    return Candidate(OP, narrow)


def found(call: Any, *only: str) -> dict[str, Finding]:
    return {one.check: one for one in run(candidate(call), only=only)}


@pytest.mark.parametrize(
    ("kernel", "shift", "seen"),
    [
        (storing, FAR, "program (0, 0, 0): a store of 4 bytes, "),
        (storing, 7, "program (0, 0, 0): a store of 4 bytes, right behind the end of out, "),
        (adding, -FAR, "an atomic of 4 bytes, "),
        (swapping, FAR, "an atomic of 4 bytes, "),
        (reading, -1, "a load of 4 bytes, 4 bytes before the start of x, a buffer of 32 bytes"),
    ],
    ids=["far store", "near store", "atomic", "swap", "load"],
)
def test_an_access_out_of_bounds_is_named_and_not_made(kernel: Any, shift: int, seen: str) -> None:
    """With the line, the kernel, the program and the argument; and the process goes on."""
    findings = found(beside(kernel, shift), "outputs", "out of bounds", "determinism")
    finding = findings["out of bounds"]
    assert finding.outcome is FAILED, finding
    assert finding.rank is Rank.UNSAFE
    assert finding.message.startswith(f"{__file__}:")
    assert f": {NAME}.{kernel.fn.__name__}, " in finding.message
    assert seen in finding.message
    if kernel is not swapping:  # it has no mask, so nothing can be left out
        assert findings["outputs"].outcome is PASSED
        assert findings["determinism"].outcome is PASSED


def test_one_layout_alone_is_out_of_bounds() -> None:
    findings = found(beside(storing, FAR, "strided"), "outputs", "out of bounds", "input layouts")
    assert findings["out of bounds"].case.endswith("-strided_inputs")
    assert {findings[name].outcome for name in ("outputs", "input layouts")} == {PASSED}
    (alone,) = found(beside(storing, FAR, "strided"), "out of bounds").values()
    assert alone.case.endswith("-strided_inputs"), "also where nothing else is asked for"


def test_an_access_that_one_check_alone_sees_is_its_fault() -> None:
    finding = found(beside(storing, FAR), "determinism")["determinism"]
    assert (finding.outcome, finding.rank) == (FAILED, Rank.UNSAFE)
    assert finding.message.startswith("out of bounds: ")


@pytest.mark.parametrize(("bounded", "outcome"), [(True, "failed"), (False, "passed")])
def test_where_bounds_do_not_hold_no_other_check_says_it_again(bounded: bool, outcome: str) -> None:
    checks = remote.Checks.__new__(remote.Checks)
    checks.candidates = {"tried": candidate(beside(storing, FAR))}
    (one,) = checks.findings("tried", ["determinism"], [], bounded, {})
    assert one["outcome"] == outcome, one


def test_an_endless_loop_is_ended_and_named() -> None:
    with interpreter.limited(steps=100), pytest.raises(Exception, match="more than 100 operations"):
        endless[(1,)](torch.ones(8), torch.zeros(8, dtype=torch.int32), 8, SHIFT=0)
    with interpreter.limited(steps=100):
        storing[(2,)](torch.ones(8), torch.zeros(8), 8, SHIFT=0)


def test_one_layout_alone_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "limited", partial(interpreter.limited, 50_000))

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.stride()[-1] == 2:
            endless[(1,)](torch.ones(8), torch.zeros(8, dtype=torch.int32), 8, SHIFT=0)
        return OP["eager"].call(gate, up)

    findings = found(call, "outputs", "input layouts", "gradient layouts")
    assert findings["input layouts"].outcome is CRASHED
    assert findings["input layouts"].case.endswith("-strided_inputs")
    assert (
        f"{NAME}.endless, program (0, 0, 0): more than 50,000" in findings["input layouts"].message
    )
    assert {findings[name].outcome for name in ("outputs", "gradient layouts")} == {PASSED}


def test_what_is_within_its_tensors_is_left_alone() -> None:
    bounds, out = Bounds(), torch.zeros(8)
    with watched(bounds.watch):
        storing[(2,)](torch.ones(8), out, 8, SHIFT=0)
    assert not bounds.strays
    assert out.sum() == 8


def apart(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements from the start of one to the start of the other, which lies elsewhere."""
    return (other.data_ptr() - one.data_ptr()) // one.itemsize


@pytest.mark.parametrize("kernel", [storing, adding, reading], ids=["store", "atomic", "load"])
def test_an_access_beyond_a_tensor_that_reaches_another_one_is_out_of_bounds(kernel: Any) -> None:
    """Which one it reaches depends on the allocator, so two runs would differ."""
    x, out, bounds = torch.ones(8), torch.zeros(8), Bounds()
    shift = apart(x, out) if kernel is reading else apart(out, x)
    with watched(bounds.watch):
        kernel[(1,)](x, out, 8, SHIFT=shift)
    (stray,) = bounds.strays
    name = "x" if kernel is reading else "out"
    assert f" of {name}, a buffer of 32 bytes" in stray
    assert (x == 1).all()
    assert (out == 0).all()


X, Y = Region(1000, 1100, "x"), Region(5000, 5100, "y")


@pytest.mark.parametrize(
    ("address", "where"),
    [
        (998, "2 bytes before the start of x"),
        (1098, "across the end of x"),
        (1100, "right behind the end of x"),
        (2900, "1800 bytes behind the end of x"),
        (3050, "1950 bytes before the start of y"),
        (4998, "2 bytes before the start of y"),
        (5100, "right behind the end of y"),
    ],
)
def test_a_stray_access_is_told_as_beside_the_nearest_tensor(address: int, where: str) -> None:
    bounds = Bounds()
    bounds._regions = [X, Y]
    bounds._note("k", (0, 0, 0), address, 4, "load")
    (stray,) = bounds.strays
    assert f"a load of 4 bytes, {where}, a buffer of 100 bytes" in stray


def test_stray_accesses_are_told_once_by_kernel_tensor_and_kind() -> None:
    bounds = Bounds()
    bounds._regions = [X._replace(end=1002), Y]
    for kernel, address, kind in itertools.product("kj", (1000, 5100), ("load", "store", "load")):
        bounds._note(kernel, (0, 0, 0), address, 4, kind)
    assert len(bounds.strays) == len(set(bounds.strays)) == 8
    assert sum("across the end of x, a buffer of 2 " in stray for stray in bounds.strays) == 4


@jit
def from_table(table, x, out, SHIFT: tl.constexpr, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    found = tl.load(tl.load(table).to(tl.pointer_type(tl.float32)))
    place = out + tl.cast(SHIFT, tl.int64)
    if NUMBER:
        place = place.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(place, found)


@pytest.mark.parametrize("low", [False, True], ids=["high", "low"])
def test_beside_a_table_of_addresses_what_an_argument_points_to_is_held(low: bool) -> None:
    hidden, x, out = filled(3.0, low=low), torch.ones(8), torch.zeros(8)
    table, bounds = torch.tensor([hidden.data_ptr()]), Bounds()
    with watched(bounds.watch):
        from_table[(1,)](table, x, out, SHIFT=apart(out, x), NUMBER=False)
        assert len(bounds.strays) == 1
        assert (x == 1).all()
        from_table[(1,)](table, x, out, SHIFT=0, NUMBER=False)
    assert out[0] == 3
    assert len(bounds.strays) == 1
    assert list(bounds.unheld) == [f"{NAME}.from_table"]


@pytest.mark.parametrize("low", [False, True], ids=["high", "low"])
def test_a_pointer_that_was_a_number_may_reach_each_tensor_of_the_launch(low: bool) -> None:
    hidden, x, out = filled(3.0, low=low), torch.ones(8), torch.zeros(8)
    table, bounds = torch.tensor([hidden.data_ptr()]), Bounds()
    with watched(bounds.watch):
        from_table[(1,)](table, x, out, SHIFT=apart(out, x), NUMBER=True)
    assert not bounds.strays
    assert x[0] == 3


@jit
def by_number(index, out, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = out + tl.cast(SHIFT, tl.int64)
    value = tl.load(index).to(tl.float32)
    tl.store(place.to(tl.int64).to(tl.pointer_type(tl.float32)), value)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_beside_indices_a_pointer_that_was_a_number_reaches_nothing_else(large: bool) -> None:
    index = torch.tensor([no_address() if large else 3])
    out, hidden, bounds = torch.zeros(8), torch.zeros(8), Bounds()
    with watched(bounds.watch):
        by_number[(1,)](index, out, SHIFT=apart(out, hidden))
    assert len(bounds.strays) == 1
    assert not bounds.unheld
    assert not hidden.any()


@jit
def from_number(where, out):  # type: ignore[no-untyped-def]
    place = where.to(tl.int64)  # a low one is given in 32 bits
    tl.store(out, tl.load(place.to(tl.pointer_type(tl.float32))))


@pytest.mark.parametrize("low", [False, True], ids=["high", "low"])
def test_an_address_may_be_given_as_a_number(low: bool) -> None:
    hidden, out, bounds = filled(3.0, low=low), torch.zeros(8), Bounds()
    with watched(bounds.watch):
        from_number[(1,)](hidden.data_ptr(), out)
    assert not bounds.strays
    assert out[0] == 3
    assert list(bounds.unheld) == [f"{NAME}.from_number"]


@jit
def copying(x, out, n, stride, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 512)
    tl.store(out + at, tl.load(x + at * stride, mask=at < n) * FACTOR, mask=at < n)


def test_a_wrong_result_names_the_input_and_the_kernel_with_its_line() -> None:
    """The second input is read as if its rows were those of the first."""

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        read = torch.empty(up.shape)
        copying[(1,)](up.detach(), read, up.numel(), 1, FACTOR=1.0)
        return OP["eager"].call(gate, up + (read - up.detach()))

    assert OP.cases[0].dims["N"] * OP.cases[0].dims["F"] <= 512
    findings = found(call, "outputs", "input layouts")
    assert findings["outputs"].outcome is PASSED
    message = findings["input layouts"].message
    assert message.endswith("; up alone in this layout is enough")
    line = copying.fn.__code__.co_firstlineno
    assert f"kernels: {NAME}.copying ({__file__}:{line})" in message


def changing(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Other bits in each call."""
    storing[(2,)](torch.ones(8), torch.zeros(8), 8, SHIFT=0)
    return OP["eager"].call(gate, up) * (1 + 1e-3 * torch.rand(()))


def forgetting(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The last row stays as allocated."""
    storing[(2,)](torch.ones(8), torch.zeros(8), 8, SHIFT=0)
    y, written = OP["eager"].call(gate, up), torch.empty(gate.shape)
    written[:-1] = y.detach()[:-1]
    return y + (written - y.detach())


@pytest.mark.parametrize(
    ("call", "check"), [(changing, "determinism"), (forgetting, "unwritten memory")]
)
def test_a_fault_of_any_check_names_the_kernels_with_their_lines(call: Any, check: str) -> None:
    finding = found(call, check)[check]
    assert finding.outcome is FAILED, finding
    line = storing.fn.__code__.co_firstlineno
    assert finding.message.endswith(f"; kernels: {NAME}.storing ({__file__}:{line})")


def test_each_tensor_of_a_launch_has_a_name_of_its_own() -> None:
    a, b, c, d = (torch.ones(1) for _ in range(4))
    base = SimpleNamespace(base=d)  # as a descriptor has it
    arguments = {"x": a, "n": 3, "one": (b,), "two": [b, c], "far": torch.ones(1, device="meta")}
    found = list(tensors_of({**arguments, "of": base, "mixed": (3, base, a)}))
    names = ["x", "one", "two[0]", "two[1]", "of", "mixed[1]", "mixed[2]"]
    assert [name for name, _ in found] == names
    expected = [a, b, b, c, d, d, a]
    assert all(one is other for (_, one), other in zip(found, expected, strict=True))
