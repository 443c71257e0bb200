"""`assert_accurate`: right code passes, wrong code fails by name and place, and a reference that
cannot judge is refused."""

import copy
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl

from tinyllama.harness.declare.specs import FLOATS
from tinyllama.harness.machine.errors import UsageError
from tinyllama.testing import assert_accurate

Softmax = Callable[[torch.Tensor, int], torch.Tensor]


@triton.jit
def softmax_kernel(x, y, N, BLOCK: tl.constexpr, AFTER: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * N + at, mask=at < N, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(row - tl.max(row, axis=0))
    result = numerator / tl.sum(numerator, axis=0)
    tl.store(y + tl.program_id(0) * N + at, result, mask=at < N + AFTER)


@triton.autotune([triton.Config({"BLOCK": size}) for size in (128, 256)], key=["N"])
@triton.jit
def tuned_kernel(x, y, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    softmax_kernel(x, y, N, BLOCK, 0)


def interpreted_softmax(x: torch.Tensor, dim: int, after: int = 0) -> torch.Tensor:
    """A softmax by a kernel, which writes ``after`` elements beyond each row."""
    assert dim == -1
    x = x.contiguous()
    y = torch.empty_like(x)
    softmax_kernel[(x[..., 0].numel(),)](x, y, x.shape[-1], BLOCK=256, AFTER=after)
    return y


class _Softmax(torch.autograd.Function):
    """``backward``: the gradient from the upstream gradient and the result in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, kernel: Softmax, backward: Any) -> Any:
        y = kernel(x, dim)
        ctx.save_for_backward(y)
        ctx.gradient = backward
        return y

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return ctx.gradient(upstream, y.float()).to(y.dtype), None, None, None


def gradient(upstream: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    g = upstream.float()
    return y * (g - (g * y).sum(-1, keepdim=True))


def torch_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(x.float(), dim).to(x.dtype)


def softmax(
    x: torch.Tensor, dim: int, *, kernel: Softmax = torch_softmax, backward: Any = gradient
) -> torch.Tensor:
    result: torch.Tensor = _Softmax.apply(x, dim, kernel, backward)
    return result


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def failure(candidate: Any, reference: Any, *tensors: Any, **params: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_accurate(candidate, reference, *tensors, **params)
    return str(caught.value)


# -- right code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernel", [torch_softmax, interpreted_softmax])
def test_a_right_softmax_passes(kernel: Softmax, dtype: torch.dtype) -> None:
    x = drawn(8, 67, dtype=dtype)
    assert_accurate(functools.partial(softmax, kernel=kernel), torch.softmax, x, dim=-1)


def test_a_kernel_that_was_decorated_before_runs_in_a_plain_process() -> None:
    """Without an environment variable, under triton.autotune too. torch and triton are afterwards
    as they were."""
    lines = [
        "import torch, triton",
        f"from {__name__} import *",
        "def tuned(x, dim):",
        "    y = torch.empty_like(x)",
        "    tuned_kernel[(len(x),)](x, y, x.shape[-1])",
        "    return y",
        "def members():",
        "    owners = torch.cuda, triton.JITFunction, type(tuned_kernel)",
        "    return [triton.jit, triton.autotune, *({**vars(owner)} for owner in owners)]",
        "if torch.cuda.is_available():",
        "    torch.cuda.init()  # which sets members of torch.cuda",
        "    torch.cuda.get_device_properties(0)",
        "before = members()",
        "assert_accurate(tuned, torch.softmax, drawn(3, 67), dim=-1, grad=False)",
        "assert members() == before",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=120)


def test_modules_are_compared_with_the_gradients_of_their_parameters() -> None:
    class Norm(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(drawn(67))
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = x * x.float().square().mean(-1, keepdim=True).rsqrt()
            through = self.weight * self.scale + self.weight.detach() * (1 - self.scale)
            return normed * through

    reference = torch.nn.RMSNorm(67, eps=1e-12)
    right = Norm(1.0)
    reference.load_state_dict(right.state_dict())
    assert_accurate(right, reference, drawn(4, 67))
    assert "grad parameter weight: " in failure(Norm(1.1), reference, drawn(4, 67))


def test_structures_of_tensors_and_exact_integers() -> None:
    def reference(tensors: Any, names: dict[str, Any]) -> dict[str, Any]:
        a, b = tensors
        return {"sum": (a + b, names["c"] * 2), "best": a.argmax(-1), "count": 3}

    def wrong(tensors: Any, names: dict[str, Any]) -> dict[str, Any]:
        return {**reference(tensors, names), "best": tensors[0].argmin(-1)}

    arguments = [drawn(3, 5), drawn(5)], {"c": torch.arange(4)}
    assert_accurate(reference, reference, *arguments)
    text = failure(wrong, reference, *arguments)
    assert "output['best']: " in text
    assert "output['sum']" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rounding_where_the_right_gradient_cancels_to_zero_passes(dtype: torch.dtype) -> None:
    """Of a layer norm over one element, whose terms are of the size of the upstream gradient."""

    def layer_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight)

    def candidate(x: torch.Tensor, weight: torch.Tensor, error: float) -> torch.Tensor:
        wide = x.float()
        mean, square = wide.mean(-1, keepdim=True), wide.var(-1, keepdim=True, correction=0)
        normed = (wide - mean * (1 - error)) * (square + 1e-5).rsqrt()
        return ((normed - normed.detach() + normed.detach() * 0) * weight.float()).to(x.dtype)

    arguments = drawn(5, 1, dtype=dtype), drawn(1, dtype=dtype)
    assert_accurate(functools.partial(candidate, error=1e-7), layer_norm, *arguments)
    assert "grad x: " in failure(functools.partial(candidate, error=1e-3), layer_norm, *arguments)


def test_an_input_that_the_reference_writes_is_a_result() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    def forgets(x: torch.Tensor, y: torch.Tensor) -> None:
        pass

    arguments = drawn(4), drawn(4)
    assert_accurate(add, add, *arguments, grad=False)
    assert "x: " in failure(forgets, add, *arguments, grad=False)


# -- wrong code ------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, dim: int) -> torch.Tensor:
    return (torch.softmax(x.float(), dim) * 1.01).to(x.dtype)


def with_nan(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch_softmax(x, dim).index_fill(1, torch.tensor(5), float("nan"))


def detached(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch_softmax(x.detach(), dim)


def shortened(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(x, dim)[:3]


def widened(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(x, dim).double()


def as_if_dense(upstream: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return gradient(upstream.as_strided(y.shape, y.stride()), y)


def misread(x: torch.Tensor, dim: int) -> torch.Tensor:
    return softmax(x, dim, backward=as_if_dense)


@pytest.mark.parametrize(
    ("candidate", "texts"),
    [
        (scaled, ["output: at [", "scale error 0.0", "> allowed 0.00", "softmax itself"]),
        (with_nan, ["at [0, 5]: got nan, expected 0."]),
        (detached, ["outputs ['output'] are detached from the inputs"]),
        (shortened, ["output has shape (3, 259), not (64, 259)"]),
        (widened, ["output has dtype torch.float64, not torch.bfloat16"]),
    ],
)
def test_a_wrong_result_is_named(candidate: Softmax, texts: list[str]) -> None:
    text = failure(candidate, torch.softmax, drawn(64, 259, dtype=torch.bfloat16), dim=-1)
    assert all(part in text for part in texts), text


def test_an_upstream_gradient_of_stride_0_that_is_misread_fails() -> None:
    text = failure(misread, torch.softmax, drawn(4, 67), dim=-1)
    assert "grad x: " in text
    assert "stride 0" in text


def test_the_worst_element_is_named_with_both_values() -> None:
    def wrong_tail(x: torch.Tensor, dim: int) -> torch.Tensor:
        y = torch_softmax(x, dim)
        y[2, 64:] = y[2, 64:].detach() * 1.5
        return y

    x = drawn(4, 67)
    x[2, 66] = 3.0
    right = float(torch.softmax(x, -1)[2, 66])
    text = failure(wrong_tail, torch.softmax, x, dim=-1, grad=False)
    assert f"at [2, 66]: got {1.5 * right:.6g}, expected {right:.6g}" in text
    assert "row error" in text


def test_an_access_out_of_bounds_fails_with_its_line() -> None:
    store = "    tl.store(y + tl.program_id(0) * N + at, result, mask=at < N + AFTER)\n"
    lines, first = inspect.getsourcelines(softmax_kernel.fn)
    text = failure(
        functools.partial(interpreted_softmax, after=3),
        torch.softmax,
        drawn(4, 67),
        dim=-1,
        grad=False,
    )
    assert f"{__file__}:{first + lines.index(store)}: " in text


# -- what is left alone ----------------------------------------------------------------------------


def test_inputs_and_their_gradients_are_untouched() -> None:
    def writes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight.detach().zero_()
        return x * weight

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    inputs = [drawn(4, 6)[:, ::2].requires_grad_(), drawn(3).requires_grad_()]
    for tensor in inputs:
        tensor.grad = torch.ones_like(tensor)
    before = copy.deepcopy(inputs)
    assert_accurate(multiply, multiply, *inputs)
    assert "forward changed its input weight" in failure(writes, multiply, *inputs)
    for tensor, old in zip(inputs, before, strict=True):
        assert torch.equal(tensor, old)
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.ones_like(tensor))


def test_importing_it_loads_no_plugin() -> None:
    program = "import sys, tinyllama.testing; sys.exit('_pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -- a reference that cannot judge -----------------------------------------------------------------


def test_a_reference_that_rounds_its_float64_run_is_named_with_the_line() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)

    def exact(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)

    first = inspect.getsourcelines(norm)[1]
    with pytest.raises(UsageError, match=r"float32.*oracle=") as caught:
        assert_accurate(exact, norm, drawn(4, 67))
    assert f"{__file__}:{first + 1}: " in str(caught.value)
    assert_accurate(norm, norm, drawn(4, 67, dtype=torch.bfloat16), oracle=exact)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (lambda x: F.dropout(x, 0.5), "random"),
        (lambda x: x @ torch.ones(67, 3), "does not run in float64"),
    ],
)
def test_a_reference_without_one_result_in_float64_is_refused(reference: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        assert_accurate(reference, reference, drawn(4, 67))


def test_modules_with_other_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="load_state_dict"):
        assert_accurate(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), drawn(3, 4))
