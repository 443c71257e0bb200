"""Contiguity at the boundary: what is copied is counted, what lies side by side is not copied."""

import pytest
import torch

from tinyllama.harness.declare.autograd import size_of
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.layout import as_one, contiguous, even_rows, joined, placed_alike
from tinyllama.harness.kernels.precision import compute_dtype, product
from tinyllama.model.config import ModelConfig
from tinyllama.model.llama import ALIGNMENT, TinyLlama

SHAPE = ModelConfig(
    vocab_size=70, hidden_dim=24, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=41
)


def copies_of(call: object, *args: object) -> int:
    before = layout.copies
    assert callable(call)
    call(*args)
    return layout.copies - before


def test_only_what_is_not_dense_is_copied() -> None:
    x = torch.randn(4, 6)
    assert contiguous(x) is x
    assert copies_of(contiguous, x) == 0
    for other in (x.T, x[:, ::2], x[:1].expand(4, 6)):
        assert copies_of(contiguous, other) == 1
        assert torch.equal(contiguous(other), other)


def test_tensors_side_by_side_are_one_view() -> None:
    buffer = torch.arange(30.0)
    a, b, c = buffer[2:8].view(2, 3), buffer[8:12].view(4, 1), buffer[12:20]
    view = as_one(a, b, c)
    assert view is not None
    assert view.data_ptr() == a.data_ptr()
    assert torch.equal(view, buffer[2:20])
    assert copies_of(joined, (a, b, c)) == 0


@pytest.mark.parametrize(
    "tensors",
    [
        lambda b: (b[0:4], b[6:8]),  # a gap
        lambda b: (b[4:8], b[0:4]),  # the wrong order
        lambda b: (b[0:4], b[4:8].clone()),  # another storage
        lambda b: (b[0:8:2], b[8:12]),  # not dense
        lambda b: (b[0:4], b[4:8].view(torch.int32)),  # another dtype
    ],
)
def test_others_are_copied_and_counted(tensors: object) -> None:
    assert callable(tensors)
    parts = tensors(torch.arange(12.0))
    assert as_one(*parts) is None
    if parts[0].dtype is parts[1].dtype:
        assert copies_of(joined, parts) == 1
        assert torch.equal(joined(parts), torch.cat(parts))


@pytest.mark.parametrize("change", [lambda m: m, lambda m: m.double(), lambda m: m.to("cpu")])
def test_a_models_matrices_lie_side_by_side(change: object) -> None:
    assert callable(change)
    model = change(TinyLlama(SHAPE, "v1"))
    for layer in model.layers:
        matrices = [p for p in layer.parameters() if p.dim() > 1]
        view = as_one(*matrices)
        assert view is not None
        assert view.numel() % ALIGNMENT, "else each starts there by itself"
        assert view.storage_offset() % ALIGNMENT == 0
        assert torch.equal(view, torch.cat([m.detach().flatten() for m in matrices]))
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1


@pytest.mark.parametrize(
    ("axis", "size"), [("Q", 32), ("Q+2*R", 64), ("Q/2/C", 2), ("B*T", 15), ("0", 0)]
)
def test_sizes_of_declared_axes(axis: str, size: int) -> None:
    assert size_of(axis, {"Q": 32, "R": 16, "C": 8, "B": 3, "T": 5}) == size


def test_the_dtype_of_products_is_autocasts() -> None:
    x = torch.randn(5, 7)
    assert compute_dtype(x) is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) is torch.bfloat16
        assert compute_dtype(x.double()) is torch.float64


def test_a_16_bit_product_may_have_a_wide_result() -> None:
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    assert product(a, b, torch.bfloat16).dtype is torch.bfloat16
    wide = product(a, b, torch.float32)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide, (a.float() @ b.float()), rtol=1e-2, atol=1e-2)


def test_zeros_lie_as_the_tensors_do() -> None:
    buffer = torch.arange(300.0)
    a, b, c = buffer[100:106].view(2, 3), buffer[106:110], buffer[128:200]
    found = placed_alike([a, c, b], torch.bfloat16)
    assert [(t.shape, t.dtype, t.count_nonzero().item()) for t in found] == [
        (t.shape, torch.bfloat16, 0) for t in (a, c, b)
    ]
    assert as_one(found[0], found[2]) is not None
    assert {t.untyped_storage().nbytes() for t in found} == {200}, "100 elements, those between"
    for others in ([a, torch.ones(3)], [a, buffer[200:220:2]], [buffer[:6], buffer[294:]]):
        apart = placed_alike(others)
        assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in apart)


def test_rows_that_lie_evenly_apart_are_not_copied() -> None:
    wide = torch.randn(2, 3, 8)
    for rows in (wide[..., :5], wide[0, :, :5], wide[0, 0, :5], wide[0, 0, 0]):
        assert even_rows(rows) is rows
    for other in (wide[..., ::2], wide[0, :, ::2], wide[0, 0, ::2], wide.transpose(0, 1)[:, :, :5]):
        assert copies_of(even_rows, other) == 1
        assert torch.equal(even_rows(other), other)
