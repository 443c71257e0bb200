"""What fails in plain cases is worked around: other faults are found behind it, what only follows
from it says so, and what cannot be known behind it is not called passed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support import tried as support
from correctness_tests.support.tried import MATRIX, small
from tinyllama.cli.check import _faults, _seen
from tinyllama.harness import Case
from tinyllama.harness.correct.checks import CHECKS as ALL
from tinyllama.harness.correct.checks import Finding, Outcome, Rank, sizes
from tinyllama.harness.kernels.launch import jit, tl

PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
CRASHED, BLOCKED = Outcome.CRASHED, Outcome.BLOCKED
T = torch.Tensor
Backward = Callable[[T, T, T], Any]

cases = [Case(N=5, D=8), Case(N=2, D=8)]
product = small("product", lambda x, y: x * y, {"x": MATRIX, "y": MATRIX}, {"z": "N D"}, cases)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SIZES", (1, 67, 259))


def tried(backward: Backward, forward: Callable[[T, T], T] = torch.mul) -> Any:
    return support.with_backward(forward, backward, once=True)


def found(call: Any, *only: str, **traits: Any) -> dict[str, Finding]:
    return support.found(product, call, *only, **{"double_backward": False, **traits})


def right(dz: T, x: T, y: T) -> Any:
    return dz * y, dz * x


def overwriting(dz: T, x: T, y: T) -> Any:
    gradients = right(dz.clone(), x, y)
    dz.zero_()
    return gradients


def lacking(dz: T, x: T, y: T) -> Any:
    return dz * y, None


def halved(dz: T, x: T, y: T) -> Any:
    return dz * y, dz * x * 0.5


def lacking_and_halved(dz: T, x: T, y: T) -> Any:
    return dz * y * 0.5, None


def raising(dz: T, x: T, y: T) -> Any:
    raise ArithmeticError("no gradient today")


def wrong_beyond(x: T, y: T) -> T:
    """Wrong where no declared case is."""
    return x * y * (torch.arange(len(x))[:, None] < 100)


# -- gradients that are missing -------------------------------------------------------------------


def test_a_missing_gradient_and_a_wrong_one_are_both_named() -> None:
    call = tried(lambda dz, x, y: (dz * y * 1.5, None))
    message = found(call, "gradients")["gradients"].message
    assert message.startswith("grad x: tensor error ")
    assert "grad y is missing" in message


def test_it_stays_missing_where_the_upstream_gradient_is_overwritten_too() -> None:
    def both(dz: T, x: T, y: T) -> Any:
        return overwriting(dz, x, y)[0], None

    findings = found(tried(both), "gradients", "untouched inputs")
    assert findings["untouched inputs"].outcome is FAILED
    assert findings["gradients"].message.startswith("grad y is missing")


def dense(dz: T, x: T, y: T) -> Any:
    """It reads the upstream gradient as if it were dense."""
    return dz * y * (1.0 if dz.is_contiguous() else 1.5), None


@pytest.mark.parametrize(("backward", "outcome"), [(lacking, PASSED), (dense, FAILED)])
def test_other_gradients_are_compared_in_each_layout(backward: Backward, outcome: Outcome) -> None:
    findings = found(tried(backward), "gradients", "gradient layouts", "wanted gradients")
    assert findings["gradients"].outcome is FAILED
    assert findings["gradient layouts"].outcome is outcome, findings
    assert findings["wanted gradients"].outcome is BLOCKED
    assert findings["wanted gradients"].message == "fails already: gradients"


# -- checks that compare results ------------------------------------------------------------------


@pytest.mark.parametrize("backward", [overwriting, lacking, halved, raising])
def test_a_wrong_size_is_found_behind_another_fault(backward: Backward) -> None:
    findings = found(tried(backward, wrong_beyond), "gradients", "untouched inputs", "sizes")
    assert {findings["gradients"].outcome, findings["untouched inputs"].outcome} != {PASSED}
    assert findings["sizes"].outcome is FAILED, findings
    assert findings["sizes"].message.startswith("outputs: z: ")


CHECKS = ("sizes", "special values", "empty batch", "autocast")


@pytest.mark.parametrize(
    ("backward", "outcome"),
    [
        *((overwriting, PASSED), (lacking, PASSED)),
        *((one, BLOCKED) for one in (halved, lacking_and_halved, raising)),
    ],
)
def test_what_holds_behind_a_fault_is_known_as_far_as_it_was_compared(
    backward: Backward, outcome: Outcome
) -> None:
    findings = found(tried(backward), "gradients", "untouched inputs", *CHECKS)
    for finding in map(findings.__getitem__, CHECKS):
        assert finding.outcome is outcome, finding
        said = finding.message
        assert outcome is PASSED or said == "fails already: gradients; outputs alone hold"


def test_copies_would_hide_what_is_asked_about_the_memory_of_a_call() -> None:
    finding = found(tried(overwriting), "untouched inputs", "fresh contents")["fresh contents"]
    assert finding.outcome is BLOCKED
    assert "copies of them would hide" in finding.message


def test_the_way_around_a_fault_is_within_bounds() -> None:
    """A store far out of bounds would end the process."""
    from tinyllama.harness.kernels import interpreter_values

    watched = []

    def halved_and_watched(dz: T, x: T, y: T) -> Any:
        watched.append(bool(interpreter_values.WATCHERS))
        return halved(dz, x, y)

    known = {"captured", "side stream", "sizes"}  # of a GPU; the same for one size as for others
    found(tried(halved_and_watched), *(set(ALL) - known), requires=("triton",))
    assert watched
    assert all(watched)


def test_nothing_is_looked_for_behind_wrong_outputs() -> None:
    call = tried(right, lambda x, y: x * y * 1.5)
    finding = found(call, "outputs", "special values")["special values"]
    assert (finding.outcome, finding.message) == (BLOCKED, "fails already: outputs")


# -- what follows ---------------------------------------------------------------------------------

OF_CALLS = ("scaled upstream", "backward twice", "two consumers")


@pytest.mark.parametrize(
    ("backward", "causes"),
    [
        (overwriting, ["", "", "untouched inputs"]),
        (lacking, ["gradients"] * 3),
        (right, ["", "", ""]),
    ],
)
def test_what_is_not_there_behind_a_fault_follows_from_it(
    backward: Backward, causes: list[str]
) -> None:
    findings = found(tried(backward), "gradients", "untouched inputs", *OF_CALLS)
    assert [findings[one].cause for one in OF_CALLS] == causes, findings
    assert [not findings[one].outcome.good for one in OF_CALLS] == list(map(bool, causes))


def disproportionate(dz: T, x: T, y: T) -> Any:
    return dz * y + (dz.abs() > 0) * 0.01, None


def test_a_fault_that_is_there_behind_another_one_follows_from_none() -> None:
    """The gradient of x is wrong too, so that nothing is worked around."""
    finding = found(tried(disproportionate), "gradients", "scaled upstream")["scaled upstream"]
    assert (finding.outcome, finding.cause) == (FAILED, "")


@jit
def summing(x, z, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program stores the first row."""
    at = tl.arange(0, D)
    tl.store(z + at, tl.load(x + at))


def racing(x: T, y: T) -> T:
    summing[(2,)](x.contiguous(), torch.empty(x.shape[1]), D=8)
    return x * y


@pytest.mark.parametrize(
    ("forward", "outcome"), [(lambda x, y: x * y, BLOCKED), (racing, FAILED)], ids=["none", "races"]
)
def test_a_backward_that_raises_is_no_race(forward: Any, outcome: Outcome) -> None:
    call = tried(raising, forward)
    finding = found(call, "gradients", "races", requires=("triton",))["races"]
    assert finding.outcome is outcome, finding
    assert "no gradient today" not in finding.message


def test_what_follows_is_told_with_its_cause() -> None:
    findings = [
        Finding("untouched inputs", FAILED, "c1", "y was changed"),
        Finding("two consumers", FAILED, "c2", "y again", cause="untouched inputs"),
        Finding("input layouts", FAILED, "c3", "x is dense"),
        Finding("sizes", PASSED, message="up to 3"),
    ]
    assert _seen(findings) == [
        "input layouts: x is dense",
        "untouched inputs: y was changed",
        "    what follows: two consumers",
        "sizes: up to 3",
    ]
    expected = "wrong result: input layouts; unsafe: untouched inputs; what follows: two consumers"
    assert _faults(findings) == expected


# -- what a fault names ---------------------------------------------------------------------------


def test_each_input_that_is_enough_is_named() -> None:
    def both_dense(x: T, y: T) -> T:
        return x * y * (1.0 if x.is_contiguous() and y.is_contiguous() else 1.5)

    message = found(both_dense, "input layouts")["input layouts"].message
    assert message.endswith("; x or y alone in this layout is enough")


@jit
def clearing(x, D: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, D), tl.zeros((D,), tl.float32))


def cleared(x: T, y: T) -> T:
    z = x * y
    clearing[(1,)](y.detach(), D=8)
    return z


def clearing_backward(dz: T, x: T, y: T) -> Any:
    gradients = right(dz, x, y)
    clearing[(1,)](x.detach(), D=8)
    return gradients


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (cleared, "forward changed its input y"),
        (tried(clearing_backward, lambda x, y: racing(x, y)), "backward changed its input x"),
    ],
    ids=["forward", "backward"],
)
def test_a_changed_input_names_the_kernels_of_its_pass(call: Any, seen: str) -> None:
    finding = found(call, "untouched inputs", requires=("triton",))["untouched inputs"]
    where = f"{__file__}:{clearing.fn.__code__.co_firstlineno}"
    expected = f"product: {seen}; kernels: test_check_around.clearing ({where})"
    assert (finding.message, finding.rank) == (expected, Rank.UNSAFE)


def test_everything_that_is_changed_is_named() -> None:
    def clears_both(dz: T, x: T, y: T) -> Any:
        gradients = right(dz.clone(), x, y)
        dz.zero_()
        x.data.zero_()
        return gradients

    def wrong(x: T, y: T) -> T:
        z = x * y * 1.5
        y.data.zero_()
        return z

    findings = found(tried(clears_both, wrong), "untouched inputs", "outputs")
    expected = "its input x and the upstream gradient of z"
    assert findings["untouched inputs"].message == (
        f"product: forward changed its input y; backward changed {expected}"
    )
    assert findings["outputs"].outcome is FAILED


def test_a_crash_behind_a_changed_input_is_named_too() -> None:
    def clears(x: T, y: T) -> T:
        z = x * y
        y.data.zero_()
        return z

    findings = found(tried(raising, clears), "untouched inputs", "gradients", "outputs")
    assert findings["untouched inputs"].message == "product: forward changed its input y"
    assert findings["gradients"].outcome is CRASHED
    assert findings["outputs"].outcome is PASSED


@pytest.mark.parametrize("check", ["scaled upstream", "empty batch", "fresh contents"])
def test_a_crash_names_its_case(check: str) -> None:
    def never(x: T, y: T) -> T:
        raise ArithmeticError("no result today")

    finding = found(never, check)[check]
    assert finding.outcome is CRASHED
    assert finding.case.startswith("product-tried-N"), finding
