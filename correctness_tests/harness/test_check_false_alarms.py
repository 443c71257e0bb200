"""What was a fault of the checks and none of the kernel: each of these candidates does what it
declares, or has one fault, which one check names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.tried import MATRIX, finding, found, small
from correctness_tests.support.tried import with_backward as of
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import Outcome, Rank
from tinyllama.harness.kernels.launch import jit, next_power_of_2, tl

PASSED, FAILED = Outcome.PASSED, Outcome.FAILED

product = small("product", lambda x, y: x * y, {"x": MATRIX, "y": MATRIX}, {"z": "N D"})
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def with_backward(backward: Backward, *, once: bool = False) -> Any:
    return of(torch.mul, backward, once=once)


def right(dz: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    return dz * y, dz * x


def detached(dz: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    return (dz * y).detach(), (dz * x).detach()


def test_a_second_derivative_of_zero_may_be_absent() -> None:
    """That of a distance, whose gradient is saved by the forward pass."""

    def backward(upstream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return upstream * x.detach().sign()

    distance = small("distance", lambda x: x.abs(), {"x": MATRIX}, {"y": "N D"})
    call = of(torch.abs, backward)
    one = finding(distance, call, "second derivative", double_backward=False)
    assert one.rank is Rank.CONTRACT, one
    assert "gives one" in one.message


@pytest.mark.parametrize(
    ("backward", "once", "rank"),
    [(right, True, None), (detached, False, Rank.ADVICE), (right, False, Rank.CONTRACT)],
    ids=["once differentiable", "detached", "given and not declared"],
)
def test_a_backward_that_is_once_differentiable_has_no_second_derivative(
    backward: Backward, once: bool, rank: Rank | None
) -> None:
    call = with_backward(backward, once=once)
    one = finding(product, call, "second derivative", double_backward=False)
    assert one.rank is rank, one


def over_saved(dz: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    dx, dy = right(dz, x.detach(), y.detach())
    with torch.no_grad():
        x.data.copy_(dx)
        y.data.copy_(dy)
    return x.detach(), y.detach()


@pytest.mark.parametrize(
    ("backward", "outcome"),
    [(over_saved, PASSED), (lambda dz, x, y: (dz * y + 1, dz * x), FAILED)],
    ids=["right", "wrong"],
)
def test_inputs_that_are_overwritten_by_design_are_given_anew(
    backward: Backward, outcome: Outcome
) -> None:
    only = ("scaled upstream", "two consumers")
    findings = found(product, with_backward(backward), *only, overwrites=("x", "y"))
    assert findings["two consumers"].outcome is PASSED, findings
    assert findings["scaled upstream"].outcome is outcome, findings
    plain = ("gradients", "untouched inputs", "determinism")
    findings = found(product, with_backward(over_saved), *plain, overwrites=("x", "y"))
    assert {one.outcome for one in findings.values()} == {PASSED}, findings


powers = Op(
    "powers",
    inputs=product.inputs,
    outputs=product.outputs,
    cases=product.cases,
    dtypes=product.dtypes,
)
powers.reference(lambda x, y: x * y * y)


class Powers(torch.autograd.Function):
    """Its gradients are in the memory of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y * y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = (one.detach() for one in ctx.saved_tensors)
        dx, dy = gradients[0] * y * y, 2 * gradients[0] * x * y
        x.data.copy_(dx)
        y.data.copy_(dy)
        return x, y


def in_order(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Right unless y lies before x in one memory."""
    one_memory = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    z: torch.Tensor = Powers.apply(x, y)
    return z + (one_memory and y.data_ptr() < x.data_ptr())


@pytest.mark.parametrize(
    ("call", "outcome"), [(Powers.apply, PASSED), (in_order, FAILED)], ids=["right", "wrong"]
)
def test_inputs_that_are_overwritten_by_design_may_lie_in_one_memory(
    call: Any, outcome: Outcome
) -> None:
    """But they are not one tensor, whose two gradients would overwrite each other."""
    traits = {"overwrites": ("x", "y"), "double_backward": False}
    one = found(powers, call, "fresh contents", **traits)["fresh contents"]
    assert one.outcome is outcome, one
    assert outcome is PASSED or "x, y behind each other in one memory" in one.message


def test_what_backward_overwrites_fails_the_checks_that_are_about_it() -> None:
    """Its gradients are in proportion, and those of another consumer are right."""
    only = ("untouched inputs", "backward twice", "scaled upstream", "two consumers")
    findings = found(product, with_backward(over_saved), *only)
    assert [findings[one].outcome for one in only] == [FAILED, FAILED, PASSED, PASSED]


mean = small("mean", lambda x: (x.sum() / x.numel(), x.sum(0)), {"x": MATRIX}, {"y": "", "z": "D"})


def of_none(y: float, z: float) -> Any:
    """The mean, but for no rows: of these values."""

    def call(x: torch.Tensor) -> Any:
        if len(x):
            return x.mean(), x.sum(0)
        return x.sum() + y, x.sum(0) + z

    return call


@pytest.mark.parametrize(
    ("y", "z", "outcome"),
    [(0.0, 0.0, PASSED), (torch.nan, 0.0, PASSED), (0.0, 1.0, FAILED), (0.0, torch.nan, FAILED)],
)
def test_the_mean_of_no_rows_is_undefined_and_their_sum_is_zero(
    y: float, z: float, outcome: Outcome
) -> None:
    one = finding(mean, of_none(y, z), "empty batch")
    assert one.outcome is outcome, one


def refusing(x: torch.Tensor) -> Any:
    if not len(x):
        raise ValueError("no rows")
    return x.mean(), x.sum(0)


def test_no_rows_may_be_refused_and_an_output_may_have_another_dtype() -> None:
    one = finding(mean, refusing, "empty batch")
    assert (one.rank, one.outcome) == (Rank.CONTRACT, FAILED)
    assert "ValueError: no rows" in one.message

    def wrong_for_no_rows(x: torch.Tensor) -> Any:
        if not x.shape[1]:
            raise ValueError("no columns")
        return of_none(0.0, 1.0)(x)

    assert finding(mean, wrong_for_no_rows, "empty batch").rank is Rank.WRONG

    def wide(x: torch.Tensor) -> Any:
        return x.double().mean(), x.double().sum(0)

    dtypes = {"y": torch.float64, "z": torch.float64}
    for check in ("empty batch", "compiled"):
        assert finding(mean, wide, check).outcome is FAILED
        one = finding(mean, wide, check, output_dtypes=dtypes)
        assert one.outcome is PASSED, one


@jit
def copying(x, z, stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """z is dense, and stored as if it had the strides of x."""
    at = tl.program_id(0) * stride + tl.arange(0, D)
    tl.store(z + at, tl.load(x + at))


copy = small("copy", lambda x: x.clone(), {"x": Tensor("N D")}, {"z": "N D"}, [Case(N=5, D=64)])


def test_which_input_it_is_is_asked_within_bounds() -> None:
    """A store far out of bounds would change memory of the process that asks."""
    from tinyllama.harness.kernels import interpreter_values

    watched = []

    def stored_apart(x: torch.Tensor) -> torch.Tensor:
        watched.append(bool(interpreter_values.WATCHERS))
        z = torch.empty(x.shape)
        copying[(len(x),)](x, z, x.stride(0), D=x.shape[1])
        return z

    findings = found(copy, stored_apart, "input layouts", "out of bounds", requires=("triton",))
    assert findings["input layouts"].outcome is FAILED
    assert "x alone in this layout is enough" in findings["input layouts"].message
    assert "a store of 4 bytes" in findings["out of bounds"].message
    assert all(watched)


def test_a_missing_gradient_is_no_race() -> None:
    call = with_backward(lambda dz, x, y: (dz * y, None))
    findings = found(product, call, "gradients", "races", requires=("triton",))
    assert [one.outcome for one in findings.values()] == [FAILED, PASSED]


@jit
def halves_kernel(x, y, D, HALF, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    row, to = tl.program_id(0) * D, tl.where(at < HALF, at + HALF, at - HALF)
    tl.store(y + row + to, tl.load(x + row + at, mask=at < D), mask=at < D)


@pytest.mark.parametrize("check", ["fresh contents", "resources", "special values"])
def test_sizes_that_the_reference_refuses_are_not_asked_for(check: str) -> None:
    """Although the op does not declare that D must be even."""

    def call(x: torch.Tensor) -> torch.Tensor:
        x, y, half = x.contiguous(), x.new_empty(x.shape), x.shape[1] // 2
        assert x.shape[1] // half, "a division by zero for one column"
        halves_kernel[(len(x),)](x, y, x.shape[1], half, BLOCK=64)
        return y

    plain = Tensor("N D")
    swapped = lambda x: x.unflatten(1, (2, -1)).flip(1).flatten(1)  # noqa: E731
    halves = small("halves", swapped, {"x": plain}, {"y": "N D"}, cases=[Case(N=5, D=8)])
    seen = finding(halves, call, check, requires=("triton",))
    assert seen.outcome is PASSED or seen.rank is Rank.ADVICE, seen


@jit
def tile_kernel(x, y, N, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < N) & (columns < D)
    tl.store(y + rows * D + columns, tl.load(x + rows * D + columns, mask=mask), mask=mask)


def test_a_size_whose_tile_triton_takes_nowhere_is_refused_and_not_wrong() -> None:
    """Nor is it a limit of the interpreter: the compiler raises the same error."""

    def call(x: torch.Tensor) -> torch.Tensor:
        x, y, (N, D) = x.contiguous(), x.new_empty(x.shape), x.shape
        tile_kernel[(1,)](x, y, N, D, ROWS=8192, BLOCK=max(64, next_power_of_2(D)))
        return y

    few: Any = lambda dims: None if dims["N"] == 5 else "other rows"  # noqa: E731
    seen = finding(copy, call, "sizes", requires=("triton",), supports=few)
    assert (seen.outcome, seen.rank) == (Outcome.CRASHED, Rank.CONTRACT), seen
    assert "exceeds triton maximum" in seen.message
