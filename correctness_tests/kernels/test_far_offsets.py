"""Offsets past 2^31 without the memory: every kernel, interpreted, on addresses that cost nothing.

Untouched memory is only addresses. So rows may lie 2^30 elements apart, or a tensor may have 2^31
elements of which a few programs touch the first and the last. The results are those of dense and
small tensors, bit for bit, and no sum or product of 32 bits may overflow on the way to an address.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterError, interpreter_builder

from correctness_tests.support.launched import NEVER_LARGE, kernels, name_of
from tinyllama.harness.kernels import interpreter, layout
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import rms_norm_kernels as norms
from tinyllama.ops.adamw import UPDATE, one_launch
from tinyllama.ops.attention import FARTHEST_ROW, attend, attend_backward
from tinyllama.ops.cross_entropy import loss_backward, losses_and_gradient, row_losses
from tinyllama.ops.linear_cross_entropy import scaled
from tinyllama.ops.rope import rope_tables, rotate
from tinyllama.ops.silu_mul import activate, activate_backward
from tinyllama.ops.swiglu import element_kernel
from tinyllama.ops.transpose import transposed

BEYOND = 2**31
APART = 2**30 + 64  # elements; a stride of more would itself have 64 bits, and hide a narrow row
BF16 = torch.bfloat16
EPS = 1e-5

Results = list[torch.Tensor]
Put = Callable[..., torch.Tensor]  # a tensor -> the same values somewhere; ``axis`` is far apart
Choose = Callable[[int], None]


def room(elements: int) -> torch.Tensor:
    """Zeros, of which only what is touched takes memory."""
    with enough_addresses():
        block = mmap.mmap(-1, elements * BF16.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(block, dtype=BF16)


@contextlib.contextmanager
def enough_addresses() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if "allocate memory" not in str(error):
            raise
        pytest.skip(f"this system promises no memory that it may not have: {error}")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=BF16)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer of 32 bits that overflows in a kernel ends it."""
    monkeypatch.setattr(
        interpreter_builder, "options", replace(interpreter_builder.options, debug=True)
    )


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that forgot to make their integers wide."""
    to, cast = tl.tensor.to, tl.cast

    @functools.wraps(to)
    def stay(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return self if dtype == tl.int64 else to(self, dtype, *args, **kwargs)

    @functools.wraps(cast)
    def leave(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return x if dtype == tl.int64 else cast(x, dtype, *args, **kwargs)

    monkeypatch.setattr(tl.tensor, "to", stay)
    monkeypatch.setattr(tl, "cast", leave)


# -- rows far apart -------------------------------------------------------------------------------


class Far:
    """Puts tensors into one room, slices of an axis ``APART`` elements from each other."""

    def __init__(self) -> None:
        self._room, self._next = room(BEYOND + 2**25), 0

    def __call__(self, x: torch.Tensor, axis: int = 0, stride: int = APART) -> torch.Tensor:
        sizes = [n for i, n in enumerate(x.shape) if i != axis]
        strides = list(torch.empty(sizes, device="meta").stride())
        strides.insert(axis, stride)
        view = self._room.as_strided(x.shape, strides, self._next)
        self._next += x[:0].numel() + x.numel() // x.shape[axis]
        return view.copy_(x)


def near(x: torch.Tensor, axis: int = 0, stride: int = APART) -> torch.Tensor:
    return x.clone()


def norm(put: Put) -> Results:
    x, residual, dy, dresidual = (put(randn(3, 40, seed=seed)) for seed in range(4))
    weight = randn(40)
    y, rstd = norms.norm_forward(x, weight, EPS, BF16)
    dx, low, partials = norms.norm_backward(dy, x, weight, rstd, dresidual, torch.float32)
    added, total, scale = norms.launch_forward(x, residual, weight, EPS, BF16)
    assert low is not None
    assert total is not None
    return [y, rstd, dx, low, partials, added, total, scale]


def activation(put: Put) -> Results:
    dh, gate, up = (put(randn(3, 40, seed=seed)) for seed in range(3))
    results = [put(unwritten(3, 40)) for _ in range(3)]
    activate_backward(dh, gate, up, *results)
    return [activate(gate, up), *results]


def element(put: Put) -> Results:
    """The naive kernel, whose gate and up may lie apart."""
    x, weights = randn(3, 8), (randn(5, 8, seed=1), randn(5, 8, seed=2))
    h, gate, up = x.new_empty(3, 5), put(randn(3, 5)), put(randn(3, 5))
    element_kernel[(15,)](x, *weights, h, gate, up, 8, 5, gate.stride(0), BLOCK=8, num_warps=1)
    return [h, gate, up]


def rotation(put: Put, axis: int) -> Results:
    """Of 3 batches, 3 tokens, and 3 heads: one of them is the axis."""
    q, k = (put(randn(3, 3, 3, 8, seed=seed), axis) for seed in range(2))
    q_out, k_out = (put(unwritten(3, 3, 3, 8), axis) for _ in range(2))
    rotate(q, k, *rope_tables(3, 8), q_out, k_out)
    return [q_out, k_out]


def attended(put: Put, tokens: int = 5, heads: tuple[int, int] = (1, 1), **where: int) -> Results:
    """Of so many heads of queries, and of keys and values; 3 batches where these are far apart."""
    batches = 3 if where["axis"] == 0 else 1
    of_q, of_kv = ((batches, tokens, n, 16) for n in heads)
    shapes = (of_q, of_q, of_kv, of_kv)
    do, q, k, v = (put(randn(*shape, seed=i), **where) for i, shape in enumerate(shapes))
    gradients = [put(unwritten(*shape), **where) for shape in shapes[1:]]
    o, lse = attend(q, k, v)
    attend_backward(do, q, k, v, o, lse, *gradients)
    return [o, lse, *gradients]


def losses(put: Put, classes: int) -> Results:
    targets = torch.tensor([1, 0, classes - 1])
    logits, gradient = put(randn(3, classes)), put(unwritten(3, classes))
    loss, lse = row_losses(logits, targets)
    loss_backward(logits, targets, lse, torch.tensor(1.0), gradient)
    again = put(unwritten(3, classes))
    both = losses_and_gradient(logits, targets, 0.5, loss.clone(), again)
    return [loss, lse, gradient, both, losses_and_gradient(logits, targets, 0.5, loss)]


APART_BY: dict[str, Callable[[Put], Results]] = {
    "norm": norm,
    "activation": activation,
    "element": element,
    "rotation-batches": functools.partial(rotation, axis=0),
    "rotation-tokens": functools.partial(rotation, axis=1),
    "rotation-heads": functools.partial(rotation, axis=2),
    "attention-batches": functools.partial(attended, axis=0),
    "attention-heads": functools.partial(attended, heads=(3, 3), axis=2),
    "attention-groups": functools.partial(attended, heads=(3, 1), axis=2),
    "attention-tokens": functools.partial(
        attended, tokens=BEYOND // FARTHEST_ROW + 2, axis=1, stride=FARTHEST_ROW
    ),
    "loss": functools.partial(losses, classes=50),
    "loss-blocks": functools.partial(losses, classes=4100),
}


@pytest.mark.parametrize("call", APART_BY.values(), ids=APART_BY)
def test_rows_far_apart_give_the_same_bits(call: Callable[[Put], Results], checked: None) -> None:
    expected, before = call(near), layout.copies
    found = call(Far())
    assert layout.copies == before, "they were brought together"
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("call", APART_BY.values(), ids=APART_BY)
def test_a_row_of_32_bits_is_found(
    call: Callable[[Put], Results], checked: None, narrow: None
) -> None:
    call(near)
    with pytest.raises(InterpreterError, match="int32 overflow detected"):
        call(Far())


# -- programs far apart ---------------------------------------------------------------------------


class AtTheEnds:
    """A kernel's function, run by the first and the last programs of a grid alone."""

    def __init__(self, function: Callable[..., Any], programs: int) -> None:
        functools.update_wrapper(self, function)
        self.__globals__ = function.__globals__
        self.__signature__ = inspect.signature(function)
        self._function, self._programs = function, programs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at, of = interpreter_builder.grid_idx[0], interpreter_builder.grid_dim[0]
        if self._programs <= at < of - self._programs:
            return None
        return self._function(*args, **kwargs)


@pytest.fixture
def ends_alone(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Call it with how many programs at each end shall run from now on."""
    rewritten = interpreter._rewritten

    def choose(programs: int) -> None:
        monkeypatch.setattr(
            interpreter, "_rewritten", lambda function: AtTheEnds(rewritten(function), programs)
        )

    return choose


Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # what was found, what is right
FIRST_AND_LAST = [0, -1]


def at_ends(
    call: Callable[..., Results], choose: Choose, programs: int, *far: torch.Tensor
) -> Pairs:
    """Entries at the ends of what a call gives for tensors of many, and what they give alone."""
    for seed, x in enumerate(far):
        x[FIRST_AND_LAST] = randn(2, *x.shape[1:], seed=seed).abs()  # AdamW takes a root
    expected = call(*(x[FIRST_AND_LAST] for x in far))
    choose(programs)
    with enough_addresses():
        found = call(*far)
    return [(x[FIRST_AND_LAST], y) for x, y in zip(found, expected, strict=True)]


def many_rows(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """Of the widest norm, and as many rows of partial sums."""
    monkeypatch.setattr(norms, "partial_rows", lambda n_rows, device: n_rows)
    weight = randn(norms.WIDEST)

    def call(x: torch.Tensor, dy: torch.Tensor) -> Results:
        y, total, rstd = norms.launch_forward(x, dy, weight, EPS, BF16)
        dx, low, partials = norms.norm_backward(dy, x, weight, rstd, x, torch.float16)
        assert total is not None
        assert low is not None
        return [y, total, rstd, dx, low, partials]

    rows = BEYOND // norms.WIDEST + 2
    return at_ends(call, choose, 1, *(room(rows * norms.WIDEST).view(rows, -1) for _ in range(2)))


def many_batches(choose: Choose, _: pytest.MonkeyPatch) -> Pairs:
    """Of attention with wide heads, whose o it allocates itself."""
    T, H, K = 64, 2, 256
    B = BEYOND // (T * H * K) + 1

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> Results:
        o, lse = attend(q, k, v)
        gradients = [x.new_empty(x.shape) for x in (q, k, v)]
        attend_backward(do, q, k, v, o, lse, *gradients)
        return [o, lse, *gradients]

    far = (room(B * T * heads * K).view(B, T, heads, K) for heads in (H, 1, 1, H))
    return at_ends(call, choose, H, *far)


def many_elements(choose: Choose, _: pytest.MonkeyPatch) -> Pairs:
    """Of what is scaled."""
    factor, x = torch.tensor(0.7), room(BEYOND + 2)
    return at_ends(lambda x: [scaled(x, factor, in_place=False)], choose, 1, x)


def many_columns(choose: Choose, _: pytest.MonkeyPatch) -> Pairs:
    """Of a transpose."""
    width = 16
    rows = BEYOND // width + 2
    return at_ends(lambda x: [transposed(x).T], choose, 1, room(rows * width).view(rows, width))


def many_parameters(choose: Choose, _: pytest.MonkeyPatch) -> Pairs:
    """Of AdamW, which has one tensor of them all."""

    def call(*tensors: torch.Tensor) -> Results:
        step, found_inf = torch.zeros(()), torch.zeros(())
        one_launch(*([x] for x in tensors), step, found_inf, lr=0.05, weight_decay=0.5)
        return list(tensors)

    with UPDATE.force(Config(BLOCK=2**16), grad="bf16"):
        return at_ends(call, choose, 1, *(room(BEYOND + 2) for _ in range(4)))


def many_angles(choose: Choose, _: pytest.MonkeyPatch) -> Pairs:
    """Of a rotation whose tables have 2^31 elements."""
    width = 2**16
    length = 2 * BEYOND // width + 1

    def call(x: torch.Tensor, table: torch.Tensor) -> Results:
        rotate(x[None], None, table, table, x[None], None)
        return [x]

    far = room(length * width).view(length, 1, width), room(length * width // 2).view(length, -1)
    return at_ends(call, choose, 1, *far)


MANY = [many_rows, many_batches, many_columns, many_elements]


@pytest.mark.parametrize("call", [*MANY, many_parameters, many_angles])
def test_the_first_and_the_last_of_many_give_the_same_bits(
    call: Callable[..., Pairs], checked: None, ends_alone: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, expected in call(ends_alone, monkeypatch):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("call", MANY)
def test_a_program_of_32_bits_is_found(
    call: Callable[..., Pairs],
    checked: None,
    narrow: None,
    ends_alone: Choose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InterpreterError, match="int32 overflow detected"):
        call(ends_alone, monkeypatch)


def test_every_kernel_is_tried(ends_alone: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kernels() - set(NEVER_LARGE)
    with recorded() as launches:
        for apart in APART_BY.values():
            apart(near)
        for many in (*MANY, many_parameters, many_angles):
            many(ends_alone, monkeypatch)
    assert {name_of(launch) for launch in launches} - set(NEVER_LARGE) == expected
