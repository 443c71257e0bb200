"""Faults on paths that a call takes only without gradients, among several blocks, in one layout or
dtype, or after another call: each is found by the check that is about its class."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from correctness_tests.support.tried import assert_found
from correctness_tests.support.tried import in_each_dtype as finding
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.correct.checks import Outcome, sizes
from tinyllama.harness.declare.values import Values

Call = Callable[..., Any]
FEW = (1, 259, 384, 1025)

pair = Op(
    "pair",
    inputs={"a": Tensor("N D", grad=True), "b": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=64)],
    dtypes=(torch.float32, torch.bfloat16),
)


@pair.reference
def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) * b.to(wide)).to(a.dtype)


alike = Op(
    "alike",
    inputs={"a": Tensor("N D", grad=True), "b": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)
alike.reference(lambda a, b: a * b)


def _fixed(shape: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
    return 1 + torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)


def _drawn(shape: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 5, shape, generator=made)


turned = Op(
    "turned",
    inputs={
        "x": Tensor("N D", grad=True),
        "table": Tensor("N D", values=lambda dims: Values("fixed", _fixed)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)
turned.reference(lambda x, table: x * table)


def _coins(shape: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
    return _drawn(shape, made) > 1


masked = Op(
    "masked",
    inputs={
        "x": Tensor("N D", grad=True),
        "keep": Tensor("N D", dtype=torch.bool, values=Values("coins", _coins)),
        "at": Tensor("N", dtype=torch.int64, values=Values("indices", _drawn)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=6, D=8)],
    dtypes=(torch.float32,),
)


@masked.reference
def mean_of_kept(x: torch.Tensor, keep: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    count = keep.sum(-1, keepdim=True).clamp(min=1)
    return x * keep / count * (1 + at[:, None])


spread = Op(
    "spread",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=32)],
    dtypes=(torch.float32,),
)


@spread.reference
def standardised(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Pair(torch.autograd.Function):
    """`right`; subclasses change one thing."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return upstream[0] * b, (upstream[0] * a).sum(0)


class OneGradientBuffer(Pair):
    kept: ClassVar[dict[Any, torch.Tensor]] = {}

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        da, db = Pair.backward(ctx, *upstream)
        return da, OneGradientBuffer.kept.setdefault(db.shape, torch.empty_like(db)).copy_(db)


class OneOutputBuffer(Pair):
    kept: ClassVar[dict[Any, torch.Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        y = Pair.forward(ctx, a, b)
        if any(ctx.needs_input_grad):
            y = OneOutputBuffer.kept.setdefault(y.shape, torch.empty_like(y)).copy_(y).detach()
        return y


class KeepsItsOutput(Pair):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.y = Pair.forward(ctx, a, b)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        _, b = ctx.saved_tensors
        return upstream[0] * b, (upstream[0] * ctx.y / b).sum(0)


class Saved(KeepsItsOutput):
    """Its output is saved as autograd asks for it, which refuses a change in place."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        y = a * b
        ctx.save_for_backward(y, b)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        y, b = ctx.saved_tensors
        return upstream[0] * b, (upstream[0] * y / b).sum(0)


class OneGradientOfBlocks(Pair):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        da, db = Pair.backward(ctx, *upstream)
        tail = len(da) % 64 if len(da) > 64 and not ctx.needs_input_grad[0] else 0
        a, _ = ctx.saved_tensors
        return da, db - (upstream[0] * a)[len(a) - tail :].sum(0)


class NarrowSum(Pair):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        total = torch.zeros_like(b)
        for part in (upstream[0] * a).split(2):
            total += part.sum(0)
        return upstream[0] * b, total


class OwnDifference(Pair):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        a, _ = ctx.saved_tensors
        da, db = Pair.backward(ctx, *upstream)
        return da + (a - a), db


def without_tail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where no gradient is wanted, the last block of rows is left out if it is not full."""
    y = right(a, b)
    tail = len(y) % 64 if len(y) > 64 and not (a.requires_grad or b.requires_grad) else 0
    return torch.cat([y[: len(y) - tail], y[len(y) - tail :] * 0])


def in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return right(a, b) if torch.is_grad_enabled() else a.mul_(b).clone()


def as_dense(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x is read as dense where y is dense."""
    if not y.is_contiguous() or x.is_contiguous():
        return x
    return x.as_strided(x.shape, (x.shape[-1], 1), x.storage_offset())


def asks_b(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return right(as_dense(a, b), b)


def dense_in_the_second_block(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = [a[:512], as_dense(a[512:], a.new_empty(1))]
    return right(torch.cat(rows), b)


def whole_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A row of a multiple of 128 is taken for a block of a power of two."""
    width = a.shape[-1]
    block = 1 << (width - 1).bit_length()
    return right(a, b) * (block / width if width % 128 == 0 else 1.0)


TABLES: dict[int, torch.Tensor] = {}


def by_length(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x * TABLES.setdefault(len(table), table.clone())


LATEST: dict[tuple[int, int], torch.Tensor] = {}


def latest_version(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Without gradients, b comes from a copy that is kept until its address or version differs."""
    if torch.is_grad_enabled():
        return right(a, b)
    key = b.data_ptr(), b._version
    if key not in LATEST:
        LATEST.clear()
        LATEST[key] = b.clone()
    return right(a, LATEST[key])


def none_kept(x: torch.Tensor, keep: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y = x * keep / keep.sum(-1, keepdim=True) * (1 + at[:, None])
    return y


def positive_classes(x: torch.Tensor, keep: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = mean_of_kept(x, keep, at)
    return y if (at > 0).any() else y * 0


def of_squares(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * (x.square().mean(-1, keepdim=True) - mean.square() + 1e-5).rsqrt()


PLANTED: list[tuple[str, str, Op, Call, str]] = [
    ("one gradient buffer", "backward twice", pair, OneGradientBuffer.apply,
     "another backward pass changes gradients that the first one has given: b"),
    ("one output buffer", "backward twice", pair, OneOutputBuffer.apply,
     "another call changes outputs of the first: y"),
    ("an output that autograd does not know", "backward twice", pair, KeepsItsOutput.apply,
     "an output that is changed in place changes gradients, and autograd does not know: b"),
    ("in place without gradients", "fresh contents", pair, in_place,
     "a call of which no gradient is wanted changed a"),
    ("one gradient among blocks", "sizes", pair, OneGradientOfBlocks.apply, "gradients: grad b"),
    ("no gradient among blocks", "sizes", pair, without_tail, "outputs: y"),
    ("inf less inf", "special values", pair, OwnDifference.apply,
     "inf in a: a NaN reaches 1 elements of grad a"),
    ("a sum in bfloat16", "sizes", pair, NarrowSum.apply, "gradients: grad b"),
    ("another input's layout", "input layouts", alike, asks_b, "a alone is distinct"),
    ("layout of a second block", "sizes", pair, dense_in_the_second_block, "outputs: y"),
    ("a block that is no power of two", "sizes", pair, whole_blocks, "outputs: y"),
    ("a table by its length", "fresh contents", turned, by_length, "call 2, on new contents: y"),
    ("kept by its version", "fresh contents", pair, latest_version,
     "call 5, on contents that were changed through .data: y"),
    ("none kept", "special values", masked, none_kept, "keep all False: y"),
    ("class 0", "special values", masked, positive_classes, "at all 0: y"),
    ("a difference of squares", "special values", spread, of_squares, "x shifted: y"),
]  # fmt: skip
RIGHT = {(check, op.name): op for _, check, op, *_ in PLANTED}


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*FEW} <= {*sizes.SIZES}
    monkeypatch.setattr(sizes, "SIZES", FEW)


@pytest.mark.parametrize(
    ("check", "op", "call", "said"), [one[1:] for one in PLANTED], ids=[one[0] for one in PLANTED]
)
def test_a_planted_fault_is_found(check: str, op: Op, call: Call, said: str) -> None:
    assert_found(op, call, check, said)


@pytest.mark.parametrize(
    ("check", "op"),
    [(check, op) for (check, _), op in RIGHT.items()],
    ids=[f"{check} of {name}" for check, name in RIGHT],
)
def test_a_right_function_passes(check: str, op: Op) -> None:
    one = finding(op, op["eager"].call, check)
    assert one.outcome is Outcome.PASSED, one


def test_an_output_that_autograd_knows_is_saved_is_no_fault() -> None:
    one = finding(pair, Saved.apply, "backward twice")
    assert one.outcome is Outcome.PASSED, one


def test_indices_that_differ_or_are_in_order_are_not_made_equal() -> None:
    def drawn(shape: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
        return torch.randperm(shape[0], generator=made)

    def call(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        assert order.unique().numel() == len(order)
        return x[order]

    op = Op(
        "ordered",
        inputs={
            "x": Tensor("N D", grad=True),
            "order": Tensor("N", dtype=torch.int64, values=Values("order", drawn)),
        },
        outputs={"y": "N D"},
        cases=[Case(N=6, D=8)],
        dtypes=(torch.float32,),
    )
    op.reference(lambda x, order: x[order])
    one = finding(op, call, "special values")
    assert one.outcome is Outcome.PASSED, one
