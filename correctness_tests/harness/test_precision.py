"""In which precision products are computed: what is asked for, and what a device can do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels import precision
from tinyllama.harness.kernels.precision import compute_dtype, input_precision, narrowed, product

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtype", "asked", "there", "expected"),
    [
        (FP32, "highest", ("ieee", "tf32", "tf32x3"), "tf32x3"),
        (FP32, "highest", ("ieee", "tf32"), "ieee"),
        (FP32, "high", ("ieee", "tf32", "tf32x3"), "tf32"),
        (FP32, "medium", ("ieee", "tf32"), "tf32"),
        (FP32, "medium", ("ieee", "tf32x3"), "ieee"),
        (BF16, "high", ("ieee", "tf32", "tf32x3"), "ieee"),
        (torch.float64, "highest", ("ieee", "tf32", "tf32x3"), "ieee"),
    ],
)
def test_products_of_float32_are_as_torch_is_asked_and_the_chip_can(
    dtype: torch.dtype,
    asked: str,
    there: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "chip_of", lambda device: f"chip of {device}")
    monkeypatch.setattr(precision, "dot_precisions", {"chip of cpu": there}.__getitem__)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: asked)
    assert input_precision(torch.empty(1, dtype=dtype)) == expected


def test_autocast_holds_for_its_device_and_for_float32() -> None:
    meta = torch.empty(1, device="meta")
    assert [precision.autocast_kind(one) for one in (torch.empty(1), meta)] == ["cpu", "cuda"]
    with torch.autocast("cpu", BF16), torch.autocast("cuda", FP16, enabled=False):
        found = [compute_dtype(torch.empty(1, dtype=one)) for one in (FP32, FP16, torch.float64)]
        assert found == [BF16, FP16, torch.float64]
        assert compute_dtype(meta) is FP32
    assert compute_dtype(torch.empty(1)) is FP32


def test_a_copy_that_is_offered_is_taken_and_the_gradient_goes_to_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    copy = torch.tensor([3.0, 4.0], dtype=BF16)
    for offered in (None, copy):
        monkeypatch.setattr(precision.rounded, "of", lambda *given, one=offered: one)
        found = narrowed(x, BF16)
        assert torch.equal(found, x.bfloat16() if offered is None else copy)
        (grad,) = torch.autograd.grad(found, x, torch.tensor([5.0, 6.0], dtype=BF16))
        assert torch.equal(grad, torch.tensor([5.0, 6.0]))
        assert grad.dtype is FP32


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_product_is_in_the_dtype_and_the_memory_that_are_wanted(
    dtype: torch.dtype, into: bool
) -> None:
    a, b = torch.tensor([[1.0, 2.0]], dtype=BF16), torch.tensor([[3.0], [4.0]], dtype=BF16)
    memory = torch.empty(1, 1, dtype=dtype) if into else None
    found = product(a, b, dtype, memory)
    assert found.dtype is dtype
    assert found.item() == 11.0
    assert memory is None or memory.item() == 11.0


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch is asked to multiply, on a GPU that is not there."""
    asked: list[dict[str, Any]] = []

    def mm(a: Any, b: Any, **how: Any) -> Any:
        asked.append(how)
        assert (a.name, b.name) == ("a", "b")
        return torch.full((1, 1), 1.0, dtype=BF16)

    monkeypatch.setattr(torch, "mm", mm)
    return asked


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_wide_result_is_asked_of_a_gpu_that_gives_it(
    kind: str, mixed: bool, multiplied: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a: Any = SimpleNamespace(name="a", dtype=BF16, device=torch.device(kind))
    b: Any = SimpleNamespace(name="b", dtype=FP16, device=None)
    monkeypatch.setattr(precision, "_mixed_products", lambda device: mixed)
    memory = torch.zeros(1, 1)
    for into in (None, memory):
        product(a, b, FP32, into)
    wide = [{"out_dtype": FP32, "out": None}, {"out_dtype": FP32, "out": memory}]
    there = kind == "cuda" and mixed
    assert multiplied == (wide if there else [{}, {}])
    assert memory.item() == (0.0 if there else 1.0)


@pytest.mark.parametrize(
    ("gives", "expected"),
    [(FP32, True), (BF16, False), (TypeError(), False), (RuntimeError(), False)],
    ids=str,
)
def test_whether_a_product_can_be_wide_is_tried(
    gives: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        assert (a.dtype, b.dtype, a.device, out_dtype) == (BF16, BF16, CPU, FP32)
        assert a.shape == b.shape == (16, 16), "as every unit has them"
        if isinstance(gives, Exception):
            raise gives
        return torch.empty(1, dtype=gives)

    monkeypatch.setattr(torch, "mm", mm)
    assert precision._mixed_products.__wrapped__(CPU) is expected
