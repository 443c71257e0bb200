"""The copy into dense memory: its values for every layout, and how its kernel is compiled."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from correctness_tests.support.launched import WHOLLY
from correctness_tests.support.many_programs import EndsAlone
from tinyllama.harness.check.guards import GuardedMemory, watched
from tinyllama.harness.check.offsets import Far, NoAddressesError
from tinyllama.harness.kernels.copying import DIGITS, dense_copy
from tinyllama.harness.kernels.launch import Launch, recorded
from tinyllama.harness.kernels.resources import compilation, lacking

BF16 = torch.bfloat16


def numbered(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
    """Elements that all differ (in bfloat16 those of a tile)."""
    return torch.arange(torch.Size(shape).numel(), device=device).view(shape).to(dtype)


def in_order(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """x in memory whose slowest axis is order[0], and so on."""
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def launches_of(x: torch.Tensor) -> list[Launch]:
    with recorded() as found:
        dense_copy(x)
    return found


def assert_copied(x: torch.Tensor) -> None:
    found = dense_copy(x)
    assert found.is_contiguous()
    assert torch.equal(found, x)


@pytest.mark.parametrize(
    "shape", [(7,), (70, 130), (2, 1100), (3, 70, 33), (2, 3, 5, 17), (2, 1, 3, 1, 40)]
)
def test_every_order_of_axes_is_copied_by_one_launch(
    shape: tuple[int, ...], device: torch.device
) -> None:
    x = numbered(*shape, device=device)
    for order in itertools.permutations(range(x.dim())):
        other = in_order(x, order)
        assert len(launches_of(other)) == 1
        assert_copied(other)


@pytest.mark.parametrize("dtype", [torch.float64, BF16, torch.int64, torch.uint8, torch.bool])
def test_every_dtype_is_copied(dtype: torch.dtype, device: torch.device) -> None:
    x = numbered(3, 40, 33, dtype=dtype, device=device)
    assert_copied(in_order(x, (2, 1, 0)))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., ::2],
        lambda x: x[:, ::3, 1:4],
        lambda x: x[::2, 1:, ::2].transpose(0, 2),
        lambda x: x[:1].expand(6, 10, 12),
        lambda x: x[..., :1].expand(5, 10, 12),
        lambda x: x[1, 2, 3].expand(4, 5),
        lambda x: x[..., 3],
        lambda x: x[0, 0, 0],
        lambda x: x[:, :0],
    ],
)
def test_gaps_and_repeated_elements_are_copied(view: Any, device: torch.device) -> None:
    assert_copied(view(numbered(5, 10, 12, device=device)))


def test_more_axes_than_the_kernel_counts_are_torchs_to_copy() -> None:
    x = numbered(*[2] * (DIGITS + 2))
    assert launches_of(in_order(x, tuple(range(DIGITS + 1, -1, -1)))) == []
    assert_copied(in_order(x, tuple(range(DIGITS + 1, -1, -1))))


def test_a_copy_is_outside_autograd() -> None:
    assert not dense_copy(numbered(4, 6).requires_grad_().T).requires_grad


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_nothing_is_read_beside_the_tensor(order: tuple[int, int], device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("loads are seen where they are interpreted")
    memory = GuardedMemory()
    with memory, watched(memory.watch):
        dense_copy(memory.guarded(torch.randn(67, 35)).permute(order))
    assert not memory.broken()


@pytest.mark.usefixtures("checked")
def test_elements_may_lie_2_to_the_31_apart() -> None:
    x, width = numbered(3, 3, dtype=BF16), 16
    rows = 2**31 // width + 2
    try:
        for axis in (0, 1):
            assert_copied(Far()(x, axis=axis))
        ends = EndsAlone()
        many = ends.room(rows * width).view(rows, width)
        for found, expected in ends(lambda x: [dense_copy(x.T).T], 1, many):
            assert torch.equal(found, expected)
            assert expected.all(), "zeros would hide where they come from"
    except NoAddressesError as error:
        pytest.skip(f"this system promises no memory that it may not have: {error}")


# Layouts of the largest timed cases, of two to four axes: B T D, N V, B T H K.
WIDE = {
    "transposed": lambda new: new(32000, 8192).T,
    "reversed": lambda new: new(4096, 4096, 8).permute(2, 1, 0),
    "reversed heads": lambda new: new(128, 32, 4096, 4).permute(3, 2, 1, 0),
    "heads first": lambda new: new(4, 32, 4096, 128).transpose(1, 2),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("chip", WHOLLY)
@pytest.mark.parametrize("name", WIDE)
def test_both_sides_of_a_copy_are_accessed_16_bytes_at_a_time(
    name: str, chip: str, dtype: torch.dtype
) -> None:
    """A copy in the order of the result would load a transposed tensor by single elements."""
    if reason := lacking(chip):
        pytest.skip(reason)
    x = WIDE[name](lambda *shape: torch.empty(shape, dtype=dtype, device="meta"))
    (launch,) = launches_of(x)
    found = compilation(launch, chip).run()
    assert (found.instructions.loads, found.instructions.stores) == (16, 16)
    assert found.spilled == 0
