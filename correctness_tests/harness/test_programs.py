"""What only shows among many programs: races, offsets, the sums of many processors."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.saboteurs import EAGER
from correctness_tests.support.tried import finding, small
from tinyllama.harness import Case, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, large
from tinyllama.harness.correct.checks.finding import Unsupported
from tinyllama.harness.declare.specs import flat
from tinyllama.harness.kernels import jit, processors_of, tl
from tinyllama.harness.kernels.launch import processors
from tinyllama.ops import OPS
from tinyllama.ops.rms_norm import kernels


@jit
def first_elements(x, y, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Programs that store STEP elements apart; BLOCK elements each."""
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@jit
def copy_rows(x, y, stride, D, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    start = row.to(tl.int64) * stride if WIDE else row * stride
    tl.store(y + row.to(tl.int64) * D + at, tl.load(x + start + at, mask=at < D), mask=at < D)


@jit
def loop_rows(x, y, stride, D, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same: a loop's variable has the width of its bounds."""
    first = tl.program_id(0)
    first = first.to(tl.int64) if WIDE else first
    at = tl.arange(0, BLOCK)
    for row in range(first, first + 1):
        for one in tl.range(row, row + 1):
            left = tl.load(x + one * stride + at, mask=at < D)
            tl.store(y + one.to(tl.int64) * D + at, left, mask=at < D)


@jit
def adding(y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.atomic_add(y + tl.arange(0, BLOCK), 1.0)


def finding_of(check: str, call: Any, **traits: Any) -> Finding:
    op = OPS["rms_norm"]
    return finding(op, call, check, dtypes=op.dtypes, requires=("triton",), **traits)


def launching(step: int) -> Any:
    """rms_norm, beside three programs that store four elements each."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        first_elements[(3,)](torch.zeros(16), torch.zeros(16), BLOCK=4, STEP=step)
        adding[(3,)](torch.zeros(4), BLOCK=4)
        return EAGER["rms_norm"](x, weight, eps)

    return call


def test_an_address_stored_by_two_programs_is_a_race() -> None:
    finding = finding_of("races", launching(3))
    assert finding.outcome is Outcome.FAILED, finding
    kernel = "test_programs.first_elements"
    seen = "2 addresses, the first one by programs (0, 0, 0), (1, 0, 0)"
    line = first_elements.fn.__code__.co_firstlineno
    where = f"{kernel} ({__file__}:{line})"
    assert finding.message.startswith(f"{where}: two programs of a launch store to {seen}; ")
    declared = finding_of("races", launching(3), races={kernel: "equal values"})
    assert declared.outcome is Outcome.PASSED, declared


def test_programs_apart_and_atomics_are_no_race() -> None:
    finding = finding_of("races", launching(4))
    assert finding.outcome is Outcome.PASSED, finding


def test_two_launches_may_store_one_address() -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.zeros(16)
        for step in (4, 2):
            first_elements[(16 // step,)](torch.zeros(16), y, BLOCK=step, STEP=step)
        return EAGER["rms_norm"](x, weight, eps)

    finding = finding_of("races", call)
    assert finding.outcome is Outcome.PASSED, finding


@pytest.mark.parametrize("kernel", [copy_rows, loop_rows], ids=["program", "loop"])
@pytest.mark.parametrize("wide", [True, False])
def test_an_offset_of_32_bits_is_found(wide: bool, kernel: Any) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        B, T, D = x.shape
        plain = x.detach()
        for t in range(T):
            row = plain[:, t]
            copy = torch.empty(B, D, dtype=x.dtype)
            kernel[(B,)](row, copy, x.stride(0), D, WIDE=wide, BLOCK=2 ** D.bit_length())
            x = x + torch.zeros_like(x, memory_format=torch.contiguous_format).index_copy(
                1, torch.tensor([t]), (copy - row)[:, None]
            )
        return EAGER["rms_norm"](x, weight, eps)

    finding = finding_of("large offsets", call)
    assert finding.rank is (None if wide else Rank.WRONG), finding


def dense(x: torch.Tensor) -> bool:
    return x.stride(0) == x.shape[1] * x.shape[2]


@pytest.mark.parametrize(("of", "result"), [("input", "y"), ("gradient", "grad x")])
def test_rows_that_are_wrong_wherever_they_lie_are_a_fault_of_the_layout(
    of: str, result: str
) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = EAGER["rms_norm"](x, weight, eps)
        if of == "input":
            return y * (1.0 if dense(x) else 1.5)
        y.register_hook(lambda dy: dy if dense(dy) else dy * 1.5)
        return y

    finding = finding_of("large offsets", call)
    assert (finding.rank, finding.cause) == (Rank.WRONG, f"{of} layouts")
    assert finding.message.startswith(f"so it is for rows that lie 64 elements apart: {result}: ")


@jit
def copy_dense(x, y, D, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    start = (row.to(tl.int64) if WIDE else row) * D
    tl.store(y + start + at, tl.load(x + start + at, mask=at < D), mask=at < D)


@pytest.mark.parametrize("wide", [True, False])
def test_an_offset_of_32_bits_in_a_dense_tensor_is_advice(wide: bool) -> None:
    """No tensor has rows that lie far apart, and one of 2^31 elements would take gigabytes."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        dense, D = x.detach().contiguous(), x.shape[-1]
        copy = torch.empty_like(dense)
        rows = dense.numel() // D
        # A block as long as the tensor: offsets within it begin at 0.
        copy_dense[(rows,)](dense, copy, D, WIDE=wide, BLOCK=4 * 2 ** D.bit_length())
        return EAGER["rms_norm"](x + (copy - dense), weight, eps)

    finding = finding_of("large offsets", call)
    assert (finding.outcome is Outcome.PASSED) is wide, finding
    if not wide:
        assert finding.rank is Rank.ADVICE
        assert finding.message.startswith(f"{__file__}:")
        assert "test_programs.copy_dense: an offset of 32 bits reaches element" in finding.message
        assert finding.message.endswith("for more than 2^31 elements it must be int64")


@pytest.mark.parametrize(
    "count", [132, pytest.param(304, marks=pytest.mark.slow("thousands of rows are interpreted"))]
)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_gains_have_their_gradient_on_many_processors(name: str, count: int) -> None:
    """As many partial sums as a GPU with so many processors makes, of rows that do not divide."""
    op = OPS[name]
    candidate = Candidate(op, op["triton"])
    plain = next(case for case in candidate.plain() if case.case.dims.get("D") == 16)
    case = replace(plain, case=plain.case.resized(T=16 * count + 5))
    inputs = candidate.inputs(case)
    with processors(count):
        assert processors_of(torch.device("cpu")) == count
        assert kernels.partial_rows(16 * count + 5, torch.device("cpu")) == 2 * count
        wrong = candidate.wrong(case, candidate.results(inputs), inputs)
    assert not wrong, wrong


@pytest.mark.parametrize("widths", [(15, 16, 17), (15, 16)], ids=len)
def test_the_smallest_case_of_rows_that_are_not_trivial_gets_the_entries(
    widths: tuple[int, ...],
) -> None:
    """Of 16 elements at least, in this dtype; widths: those that the provider covers, in up to 9
    rows. The case may be the largest of all."""
    cases = [Case(N=7, D=17), Case(N=3, D=15), Case(N=5, D=16), Case(N=(2, 2), D=16)]
    op = small("doubled", lambda x: x * 2, {"x": Tensor("N D")}, {"y": "N D"}, cases)
    op.dtypes = BF16, FP32 = torch.bfloat16, torch.float32

    def supports(dims: Any) -> str | None:
        return None if max(flat([dims["N"]])) <= 9 and dims["D"] in widths else "other sizes"

    provider = Provider(op.name, "tried", op["eager"].call, op.dtypes, supports=supports)
    candidate = Candidate(op, provider)
    for dtype in (BF16, FP32):
        found = large._with_entries(candidate, 9, dtype)
        assert (dict(found.case.dims), found.dtype) == ({"N": 9, "D": 16}, dtype)
    with pytest.raises(Unsupported, match="can have 10 entries along N"):
        large._with_entries(candidate, 10, BF16)
    with pytest.raises(Unsupported):
        large._with_entries(candidate, 9, torch.float16)
    op.inputs = {"x": Tensor("N D", mutated=True)}
    with pytest.raises(Unsupported):
        large._with_entries(candidate, 9, BF16)


@pytest.mark.parametrize(
    ("least", "elements", "noted"),
    [(49, 100, False), (50, 100, True), (99, 100, True), (100, 100, False), (49, 99, False)],
)
def test_an_offset_grows_with_a_tensor_if_it_passes_its_middle(
    least: int, elements: int, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends within it, where no tensor of the inputs has more elements."""
    from tinyllama.harness.kernels import interpreter

    launch = SimpleNamespace(kernel="k")
    monkeypatch.setattr(interpreter, "running", lambda: (launch, (0, 0, 0)))
    monkeypatch.setattr(large, "_largest", lambda launch: {0: ("x", elements)})
    narrow = large.Narrow(enough=100)
    narrow.note(np.array([64]), np.array([least], np.int64))
    narrow.note(np.array([64]), np.array([], np.int32))
    assert not narrow.found
    narrow.note(np.array([64]), np.array([least + 3, least], np.int32))
    assert bool(narrow.found) is noted
    said = f"k: an offset of 32 bits reaches element {least} of {elements} of x"
    assert not noted or narrow.found["k"].endswith(said)
