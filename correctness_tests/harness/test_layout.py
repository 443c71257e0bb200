"""Contiguity at the boundary: what is copied is counted, what lies side by side is not copied."""

from collections.abc import Callable

import pytest
import torch

from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.layout import (
    as_one,
    as_rows,
    contiguous,
    dense_matrices,
    dense_rows,
    even_rows,
    joined,
    stacked,
)
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


def test_matrices_that_are_dense_may_lie_apart() -> None:
    buffer = torch.arange(60.0)
    apart = buffer.view(2, 30)[:, :12].view(2, 3, 4)
    for x in (apart, apart[:1].expand(3, 3, 4), apart[:0]):
        assert copies_of(dense_matrices, x) == 0
        assert dense_matrices(x) is x
    for x in (apart.mT, apart[:, :, ::2], buffer.view(5, 4, 3).permute(2, 1, 0)):
        assert copies_of(dense_matrices, x) == 1
        assert dense_matrices(x).is_contiguous()
        assert torch.equal(dense_matrices(x), x)


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


STACKED = {  # by what lies where: whether they are one view, and how far apart
    "side by side": (lambda b: [b[0:6], b[6:12], b[12:18]], 6),
    "a gap each": (lambda b: [b[0:6], b[8:14], b[16:22]], 8),
    "interleaved": (lambda b: [b[0:12:2], b[1:13:2]], 1),
    "one": (lambda b: [b[4:10]], 6),
    "in rows": (lambda b: [b[0:6].view(2, 3), b[6:12].view(2, 3)], 6),
    "uneven": (lambda b: [b[0:6], b[6:12], b[13:19]], None),
    "the first twice": (lambda b: [b[0:6], b[0:6]], None),
    "backwards": (lambda b: [b[6:12], b[0:6]], None),
    "other strides": (lambda b: [b[0:6].view(2, 3), b[6:12].view(3, 2).T], None),
    "other memory": (lambda b: [b[0:6], b.clone()[6:12]], None),
}


@pytest.mark.parametrize(("made", "apart"), STACKED.values(), ids=STACKED)
def test_tensors_equally_far_apart_are_stacked_without_a_copy(
    made: Callable[[torch.Tensor], list[torch.Tensor]], apart: int | None
) -> None:
    buffer = torch.arange(40.0)[3:]
    tensors = made(buffer)
    assert copies_of(stacked, tensors) == (apart is None)
    found = stacked(tensors)
    assert torch.equal(found, torch.stack(tensors))
    assert not stacked([one.clone().requires_grad_() for one in tensors]).requires_grad
    if apart is not None:
        assert found.data_ptr() == tensors[0].data_ptr()
        assert found.stride() == (apart, *tensors[0].stride())


def test_rows_are_a_matrix_and_a_dense_axis_is_enough() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert as_rows(x).shape == (6, 4)
    assert as_rows(x[0, 0]).shape == (1, 4)
    assert as_rows(x[0]).shape == (3, 4)
    assert as_rows(x[None]).shape == (6, 4)
    assert as_rows(x).data_ptr() == x.data_ptr()
    for dense in (x, x.transpose(0, 1), x[..., :3], x[..., 1:2], x[..., ::4]):
        assert dense_rows(dense) is dense
    for other in (x[..., ::2], x.transpose(1, 2)):
        assert copies_of(dense_rows, other) == 1
        assert dense_rows(other).is_contiguous()


def test_rows_that_lie_evenly_apart_are_not_copied() -> None:
    wide = torch.randn(2, 3, 8)
    for rows in (wide[..., :5], wide[0, :, :5], wide[0, 0, :5], wide[0, 0, 0]):
        assert even_rows(rows) is rows
    for other in (wide[..., ::2], wide[0, :, ::2], wide[0, 0, ::2], wide.transpose(0, 1)[:, :, :5]):
        assert copies_of(even_rows, other) == 1
        assert torch.equal(even_rows(other), other)
