"""Contiguity at the boundary: what is copied is counted, what lies side by side is not copied."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.launched import WHOLLY
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.programs import Far, NoAddressesError
from tinyllama.harness.kernels import HAS_TRITON, layout
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.copying import DIGITS, dense_copy
from tinyllama.harness.kernels.launch import Launch, recorded
from tinyllama.harness.kernels.layout import (
    as_one,
    contiguous,
    dense_matrices,
    dense_rows,
    even_rows,
    joined,
    stacked,
)
from tinyllama.harness.kernels.resources import compilation, lacking

BF16 = torch.bfloat16
WIDE, CUBE = torch.randn(2, 3, 8), torch.randn(2, 3, 4)


def copies_of(call: Callable[..., Any], *args: Any) -> int:
    before = layout.copies
    call(*args)
    return layout.copies - before


# By function: tensors that it returns as they are, and tensors of which it returns a dense copy.
RETURNED: dict[Callable[[torch.Tensor], torch.Tensor], tuple[list[Any], list[Any]]] = {
    contiguous: ([CUBE], [CUBE.mT, CUBE[..., ::2], CUBE[:1].expand(2, 3, 4)]),
    dense_matrices: (
        [CUBE, WIDE[:1].expand(3, 3, 8), WIDE[:, :2], WIDE[:0]],
        [CUBE.mT, WIDE[:, :, ::2], WIDE.permute(1, 2, 0)],
    ),
    dense_rows: (
        [CUBE, CUBE.transpose(0, 1), CUBE[..., :3], CUBE[..., 1:2]],
        [CUBE[..., ::2], CUBE.mT],
    ),
    even_rows: (
        [WIDE[..., :5], WIDE[0, :, :5], WIDE[0, 0, :5], WIDE[0, 0, 0]],
        [WIDE[..., ::2], WIDE[0, :, ::2], WIDE[0, 0, ::2], WIDE.transpose(0, 1)[:, :, :5]],
    ),
}


@pytest.mark.parametrize("function", RETURNED)
def test_only_what_is_not_dense_is_copied(function: Callable[..., torch.Tensor]) -> None:
    as_it_is, others = RETURNED[function]
    assert all(function(x) is x for x in as_it_is)
    for x in others:
        assert copies_of(function, x) == 1
        assert function(x).is_contiguous()
        assert torch.equal(function(x), x)


# By what lies where: whether the tensors are one view, and how far apart they are as a stack.
TOGETHER: dict[str, tuple[Callable[[torch.Tensor], list[torch.Tensor]], bool, int | None]] = {
    "side by side": (lambda b: [b[0:6], b[6:12], b[12:18]], True, 6),
    "one": (lambda b: [b[4:10]], True, 6),
    "in rows": (lambda b: [b[0:6].view(2, 3), b[6:12].view(2, 3)], True, 6),
    "a gap each": (lambda b: [b[0:6], b[8:14], b[16:22]], False, 8),
    "interleaved": (lambda b: [b[0:12:2], b[1:13:2]], False, 1),
    "uneven": (lambda b: [b[0:6], b[6:12], b[13:19]], False, None),
    "the first twice": (lambda b: [b[0:6], b[0:6]], False, None),
    "backwards": (lambda b: [b[6:12], b[0:6]], False, None),
    "other strides": (lambda b: [b[0:6].view(2, 3), b[6:12].view(3, 2).T], False, None),
    "other memory": (lambda b: [b[0:6], b.clone()[6:12]], False, None),
}


@pytest.mark.parametrize(("tensors", "is_one", "apart"), TOGETHER.values(), ids=TOGETHER)
def test_tensors_side_by_side_or_equally_far_apart_are_views(
    tensors: Callable[[torch.Tensor], list[torch.Tensor]], is_one: bool, apart: int | None
) -> None:
    parts = tensors(torch.arange(40.0)[3:])
    assert (as_one(*parts) is not None) == is_one
    assert copies_of(joined, parts) == (not is_one)
    assert torch.equal(joined(parts), torch.cat([part.flatten() for part in parts]))
    assert copies_of(stacked, parts) == (apart is None)
    assert torch.equal(stacked(parts), torch.stack(parts))
    assert apart is None or stacked(parts).data_ptr() == parts[0].data_ptr()
    assert not stacked([part.clone().requires_grad_() for part in parts]).requires_grad


# -- the copy ---------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def in_order(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """x in memory whose slowest axis is order[0], and so on."""
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def launches_of(x: torch.Tensor) -> list[Launch]:
    with recorded() as launches:
        dense_copy(x)
    return launches


def assert_copied(x: torch.Tensor) -> None:
    assert dense_copy(x).is_contiguous()
    assert torch.equal(dense_copy(x), x)
    assert not dense_copy(x).requires_grad


SHAPES = [(7,), (70, 130), (2, 1100), (3, 70, 33), (2, 3, 5, 17), (2, 1, 3, 1, 40)]


@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order_of_axes_is_copied_by_one_launch(
    shape: tuple[int, ...], device: torch.device
) -> None:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).view(shape)
    for order in itertools.permutations(range(x.dim())):
        assert len(launches_of(in_order(x, order))) == 1
        assert_copied(in_order(x.requires_grad_(), order))


@pytest.mark.parametrize("dtype", [torch.float64, BF16, torch.int64, torch.uint8, torch.bool])
def test_every_dtype_gap_and_repeated_element_is_copied(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.arange(600, device=device).view(5, 10, 12).to(dtype)
    assert_copied(in_order(x, (2, 1, 0)))
    for view in (x[..., ::2], x[:, ::3, 1:4], x[::2, 1:, ::2].transpose(0, 2), x[..., 3]):
        assert_copied(view)
    for view in (x[:1].expand(6, 10, 12), x[..., :1].expand(5, 10, 12), x[0, 0, 0], x[:, :0]):
        assert_copied(view)
    assert_copied(in_order(torch.ones([2] * (DIGITS + 2)), tuple(range(DIGITS + 1, -1, -1))))


@needs_triton
def test_nothing_beside_the_tensor_is_read_and_elements_may_lie_2_to_the_31_apart() -> None:
    memory = GuardedMemory()
    with memory, watched(memory.watch):
        for order in ((0, 1), (1, 0)):
            dense_copy(memory.guarded(torch.randn(67, 35)).permute(order))
    assert not memory.broken()
    try:
        for axis in (0, 1):
            assert_copied(Far()(torch.arange(9).view(3, 3).to(BF16), axis=axis))
    except NoAddressesError as error:
        pytest.skip(f"this system promises no memory that it may not have: {error}")


# Layouts of the largest timed cases, of two to four axes: B T D, N V, B T H K.
LARGE: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "transposed": lambda new: new(32000, 8192).T,
    "reversed": lambda new: new(4096, 4096, 8).permute(2, 1, 0),
    "heads first": lambda new: new(4, 32, 4096, 128).transpose(1, 2),
}


@needs_triton
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("chip", WHOLLY)
@pytest.mark.parametrize("name", LARGE)
def test_both_sides_of_a_copy_are_accessed_16_bytes_at_a_time(
    name: str, chip: str, dtype: torch.dtype
) -> None:
    if reason := lacking(chip):
        pytest.skip(reason)
    x = LARGE[name](lambda *shape: torch.empty(shape, dtype=dtype, device="meta"))
    taken = compilation(launches_of(x)[0], chip).run()
    assert (taken.loads, taken.stores) == (16, 16)
