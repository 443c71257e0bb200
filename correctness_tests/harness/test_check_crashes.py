"""What a fault that ends a call leaves: nothing passes that was not compared, the next fault is
looked for, and a crash names the author's file and line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support import tried as support
from tinyllama.harness import Provider
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, frameworks
from tinyllama.harness.correct.checks.accuracy import PLAIN, faults
from tinyllama.harness.correct.checks.crash import place_in
from tinyllama.harness.correct.evaluate import evaluate
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.ops import OPS

OP = OPS["silu_mul"]
EAGER = OP["eager"].call
PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
CRASHED, BLOCKED = Outcome.CRASHED, Outcome.BLOCKED
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def found(
    call: Callable[..., Any], only: tuple[str, ...] = PLAIN, **traits: Any
) -> dict[str, Finding]:
    return support.found(OP, call, *only, **traits)


def outcomes(findings: dict[str, Finding]) -> list[Outcome]:
    return [one.outcome for one in findings.values()]


def with_backward(backward: Backward, factor: float = 1.0) -> Callable[..., torch.Tensor]:
    """The op, times a factor, with this backward pass in place of its own."""
    return support.with_backward(lambda gate, up: EAGER(gate, up) * factor, backward)


def right(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sigmoid = gate.sigmoid()
    return dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid


def raising(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Any:
    raise ArithmeticError("no gradient today")


def test_the_parts_of_these_candidates_are_right() -> None:
    assert outcomes(found(with_backward(right))) == [PASSED] * 4


def test_a_backward_that_raises_leaves_no_passed_gradient() -> None:
    findings = found(with_backward(raising))
    assert outcomes(findings) == [PASSED, CRASHED, BLOCKED, BLOCKED]
    assert "no gradient today" in findings["gradients"].message
    assert "gradients ended the call" in findings["untouched inputs"].message


@pytest.mark.parametrize("asked", ["gradients", "unwritten memory", "untouched inputs"])
def test_it_does_not_pass_where_one_check_alone_is_asked_for(asked: str) -> None:
    (finding,) = run_one(with_backward(raising), asked)
    assert not finding.outcome.good


def run_one(call: Callable[..., Any], asked: str) -> list[Finding]:
    return list(found(call, (asked,)).values())


def test_outputs_are_compared_behind_a_backward_that_raises() -> None:
    findings = found(with_backward(raising, factor=1.1))
    assert outcomes(findings) == [FAILED, CRASHED, BLOCKED, BLOCKED]
    assert "> allowed" in findings["outputs"].message


def test_a_forward_that_raises_leaves_nothing_passed() -> None:
    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no result today")

    findings = found(call)
    assert outcomes(findings) == [CRASHED, BLOCKED, BLOCKED, BLOCKED]
    assert all("no result today" in one.message for one in findings.values())


def test_a_fault_in_a_later_case_is_said_before_what_was_not_compared() -> None:
    """One case raises; another shows a wrong gradient, which is no gradient that was not tried."""
    smallest = Candidate(OP, OP["eager"]).smallest().case.dims["N"]

    def backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Any:
        if len(gate) == smallest:
            raise ArithmeticError("nor a gradient")
        return tuple(gradient * 1.1 for gradient in right(dy, gate, up))

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if len(gate) == smallest:
            raise ArithmeticError("no result today")
        return with_backward(backward)(gate, up)

    assert found(call)["gradients"].outcome is FAILED


def zeros_and_changed_inputs(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    call = with_backward(lambda dy, gate, up: (torch.zeros_like(gate), torch.zeros_like(up)))
    y = call(gate, up)
    gate.data.zero_()  # which autograd does not notice
    return y


def zeros_and_changed_upstream(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Any:
    dy.zero_()
    return torch.zeros_like(gate), torch.zeros_like(up)


@pytest.mark.parametrize(
    "call",
    [zeros_and_changed_inputs, with_backward(zeros_and_changed_upstream)],
    ids=["inputs", "upstream"],
)
@pytest.mark.parametrize("only", [PLAIN, ("outputs", "gradients")], ids=["all", "two"])
def test_gradients_are_compared_behind_a_changed_input(
    call: Callable[..., Any], only: tuple[str, ...]
) -> None:
    findings = found(call, only)
    assert findings["outputs"].outcome is PASSED
    assert findings["gradients"].outcome is FAILED
    assert "> allowed" in findings["gradients"].message
    assert "untouched inputs" not in only or findings["untouched inputs"].outcome is FAILED


@pytest.mark.parametrize("check", ["scaled upstream", "backward twice", "two consumers"])
def test_a_missing_gradient_passes_no_check_of_gradients(check: str) -> None:
    (finding,) = run_one(lambda gate, up: EAGER(gate, up.detach()), check)
    assert finding.outcome is FAILED
    assert "no gradient for up" in finding.message


# -- where it crashed -----------------------------------------------------------------------------


def here(text: str) -> str:
    """``FILE:LINE`` of the line of this file that has a text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (line,) = [n for n, line in enumerate(lines, 1) if line.strip() == text]
    return f"{__file__}:{line}: "


@pytest.mark.parametrize("check", ["gradients", "scaled upstream", "empty batch"])
def test_a_crash_names_file_and_line_and_carries_its_traceback(check: str) -> None:
    (finding,) = run_one(with_backward(raising), check)
    assert finding.outcome is CRASHED
    assert finding.message.startswith(here('raise ArithmeticError("no gradient today")'))
    assert "in raising" in finding.traceback


@jit
def refused(x, y, n, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDE)
    tl.atomic_add(y + at, tl.load(x + at, mask=at < n).to(tl.bfloat16), mask=at < n)


@jit
def asserting(x, y, n, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDE)
    tl.assume(n < 0)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@jit
def impossible(x, y, n, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDE)
    tl.store(y + at, tl.load(x + at, mask=at < n) + tl.arange(0, 2 * WIDE), mask=at < n)


def launching(kernel: Any, dtype: torch.dtype) -> Callable[..., Any]:
    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        scratch = torch.zeros(64, dtype=dtype, device=gate.device)
        kernel[(1,)](gate.detach(), scratch, 8, WIDE=64)
        return EAGER(gate, up)

    return call


def test_an_interpreters_limit_is_called_one_and_does_not_pass() -> None:
    """The chip's compiler takes the kernel; the interpreter has no atomics on bfloat16."""
    call = launching(refused, torch.bfloat16)
    finding = found(call, requires=("triton",))["outputs"]
    assert finding.outcome is BLOCKED
    assert finding.message.startswith("Triton's interpreter refuses what compiles for ")
    line = "tl.atomic_add(y + at, tl.load(x + at, mask=at < n).to(tl.bfloat16), mask=at < n)"
    assert here(line) in finding.message
    assert not finding.outcome.good


@pytest.mark.parametrize(
    ("kernel", "outcome"), [(impossible, CRASHED), (refused, BLOCKED)], ids=["no kernel", "limit"]
)
@pytest.mark.parametrize("check", ["outputs", "special values"])
def test_what_must_compile_is_the_case_that_the_interpreter_refuses(
    check: str, kernel: Any, outcome: Outcome
) -> None:
    """The smallest case launches nothing."""
    smallest = Candidate(OP, OP["eager"]).smallest().case.dims["N"]
    launch = launching(kernel, torch.bfloat16)

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return EAGER(gate, up) if len(gate) == smallest else launch(gate, up)

    assert found(call, (check,), requires=("triton",))[check].outcome is outcome


@pytest.mark.parametrize("kernel", [asserting, impossible], ids=["assertion", "no kernel"])
def test_a_kernel_that_is_wrong_is_no_interpreters_limit(kernel: Any) -> None:
    finding = found(launching(kernel, torch.float32), requires=("triton",))["outputs"]
    assert finding.outcome in (CRASHED, FAILED)
    assert "Triton's interpreter refuses" not in finding.message


@pytest.mark.parametrize(
    ("heading", "line"),
    [("Traceback", 9), ("(most recent call first)", 3)],
    ids=["raised", "fatal"],
)
def test_the_line_of_a_process_that_ended_is_the_innermost(heading: str, line: int) -> None:
    text = f'{heading}\n  File "/a.py", line 3 in f\n  File "/b.py", line 5\n  File "/a.py", line 9'
    assert place_in(text, "/a.py") == f"/a.py:{line}: "
    assert place_in(text, "/c.py") == ""


@pytest.mark.parametrize(
    ("varied", "contract"),
    [
        ({}, False),
        ({"layout": "strided"}, True),
        ({"upstream": "summed"}, True),
        ({"extreme": next(iter(OP.extremes))}, False),
        ({"wanted": ("gate",)}, False),
        ({"absent": "h"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("refusable", [False, True])
def test_a_refusal_breaks_the_contract_for_a_layout_and_where_all_must_be_taken(
    varied: dict[str, Any], contract: bool, refusable: bool
) -> None:
    def refusing(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise ValueError("not this one")

    candidate = Candidate(OP, Provider(OP.name, "tried", refusing, dtypes=(torch.float32,)))
    case = replace(candidate.smallest(), **varied)
    first = next(faults(candidate, case, refusable=refusable))
    assert (first.special is Rank.CONTRACT) is (contract or refusable), first


@pytest.mark.parametrize("wrong", [["first"], ["first", "second"], []])
def test_of_what_is_wrong_compiled_the_first_is_told(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Candidate, "wrong", lambda self, case, results, inputs: wrong)
    provider = Provider(OP.name, "tried", EAGER, dtypes=(torch.float32,))
    candidate = Candidate(OP, provider, backend="eager")
    told = (candidate.smallest(), "first") if wrong else None
    assert frameworks.compiled(candidate) == told


def test_a_call_in_place_gives_every_output_and_every_gradient() -> None:
    candidate = Candidate(OP, Provider(OP.name, "tried", EAGER, dtypes=(torch.float32,)))
    inputs = candidate.inputs(candidate.smallest())
    given = frameworks._run(candidate, frameworks.Graph(candidate, inputs), inputs)
    expected = evaluate(OP, EAGER, inputs)
    assert len(expected) == 3
    assert list(given) == list(expected)
    assert all(torch.equal(given[name], value) for name, value in expected.items())
