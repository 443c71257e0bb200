"""From a forward and a backward the harness derives an autograd function and a custom op."""

from typing import Any

import pytest
import torch

from correctness_tests.support.tried import derived
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.layout import contiguous


def scaled_pair(name: str) -> Op:
    """y = x * weight * factor and z = x + 1: two outputs, a parameter, a saved tensor."""
    op = Op(
        name,
        inputs={"x": Tensor("B D", grad=True), "weight": Tensor("D", grad=True)},
        params={"factor": 3.0},
        outputs={"y": "B D", "z": "B D"},
        cases=[Case(B=3, D=8), Case(B=1, D=5)],
    )

    @op.reference
    def eager(x: torch.Tensor, weight: torch.Tensor, factor: float = 3.0) -> Any:
        return x * weight * factor, x + 1

    @op.provider("manual", saved={"scaled": Tensor("D")}, keep=("x",))
    class Manual:
        @staticmethod
        def forward(x: torch.Tensor, weight: torch.Tensor, factor: float) -> Any:
            scaled = weight * factor
            y = torch.empty_like(x)
            y.copy_(x * scaled)
            return y, x + 1, scaled

        @staticmethod
        def backward(grads: Any, kept: Any, saved: Any, needs: set[str], factor: float) -> Any:
            dy, dz = grads
            dx = torch.zeros_like(kept["x"]) if dz is None else dz.clone()
            dw = torch.zeros_like(saved["scaled"])
            if dy is not None:
                dx += dy * saved["scaled"]
                dw += (dy * kept["x"]).float().sum(0) * factor
            return {"x": dx, "weight": dw}

    return op


PAIR = scaled_pair("pair")
X = {"x": Tensor("B D", grad=True)}
EAGER: Any = PAIR["eager"].call


def twice(name: str) -> Op:
    op = Op(name, inputs=X, outputs={"y": "B D"}, cases=[Case(B=3, D=8)])
    op.reference(lambda x: 2 * x)
    return op


def test_a_lost_gradient_is_an_error() -> None:
    op = scaled_pair("forgetful")

    def lossy(grads: Any, kept: Any, saved: Any, needs: set[str], factor: float) -> Any:
        return {"x": torch.ones_like(kept["x"])}

    op.provider("lossy", keep=("x", "weight"))(derived(EAGER, lossy))
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    y, _ = op(x, weight, provider="lossy")
    with pytest.raises(RuntimeError, match=r"no gradient for \['weight'\]"):
        y.sum().backward()


@pytest.mark.parametrize("by", ["call", "custom_op"])
def test_an_output_that_no_loss_uses_gives_no_gradient_and_no_zeros(by: str) -> None:
    op, used = scaled_pair("unused"), []

    def noting(grads: Any, kept: Any, saved: Any, needs: set[str], factor: float) -> Any:
        used.append([gradient is not None for gradient in grads])
        return {name: torch.ones_like(tensor) for name, tensor in kept.items()}

    op.provider("noting", keep=("x", "weight"))(derived(EAGER, noting))
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    provider: Any = op["noting"]
    results = provider(x, weight) if by == "call" else provider.derived.custom_op(x, weight, 3.0)
    results[1].sum().backward()
    assert used == [[False, True]]


@pytest.mark.long
def test_the_custom_op_is_sound_for_the_compiler() -> None:
    """opcheck: schema, fake version, autograd registration, and tracing, compiled and eager."""
    provider: Any = PAIR["manual"]
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(provider.derived.custom_op, (x, weight, 3.0))
    compiled = torch.compile(provider.call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, factor=2.0), provider(x, weight, factor=2.0))


@pytest.mark.long
def test_results_in_other_layouts_are_contiguous_for_the_compiler() -> None:
    """An output, a saved tensor and a gradient; uncompiled they stay as they are."""

    def wide(like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(len(like), 2 * like.shape[1])[:, : like.shape[1]].copy_(like)

    op = twice("strided")
    views = derived(
        lambda x: (wide(2 * x), wide(x)),
        lambda grads, kept, saved, needs: {"x": wide(2 * grads[0])},
    )
    op.provider("views", saved={"x_again": Tensor("B D")})(views)
    call = op["views"].call
    x = torch.ones(3, 8, requires_grad=True)
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones(3, 8))
    assert y.is_contiguous()
    assert dx.is_contiguous()
    assert torch.equal(dx, torch.full_like(x, 2))
    assert not call(x).is_contiguous()


@pytest.mark.long
def test_an_output_of_a_dtype_that_the_compiler_was_not_told_is_an_error() -> None:
    op = twice("untold")
    op.provider("wide")(derived(lambda x: x.double(), lambda grads, kept, saved, needs: {}))
    call = torch.compile(op["wide"].call, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"y has dtype torch.float64, the compiler was told"):
        call(torch.ones(3, 8))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_is_read_as_its_provider_asks_and_copied_once(compiled: bool) -> None:
    """Compiled, each pass copies: what the compiler keeps is the input."""
    op, read = twice("reader"), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        read.append(x.is_contiguous())
        return 2 * x

    def backward(grads: Any, kept: Any, saved: Any, needs: set[str]) -> Any:
        read.append(kept["x"].is_contiguous())
        return {"x": 2 * grads[0]}

    op.provider("triton", keep=("x",), reads={"x": contiguous})(derived(forward, backward))
    call = torch.compile(op["triton"].call, backend="aot_eager") if compiled else op["triton"].call
    before = layout.copies
    call(torch.arange(24.0).view(8, 3).T.requires_grad_()).sum().backward()
    assert layout.copies - before == (2 if compiled else 1)
    assert read == [True, True]
