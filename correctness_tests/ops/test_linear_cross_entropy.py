"""What the derived cases cannot ask of the loss's kernels in chunks.

Every case in chunks; targets that are ignored, and the reduction.
"""

import re
from typing import Any

import pytest
import torch

from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import linear_cross_entropy as linear_file
from tinyllama.ops.cross_entropy import REDUCTIONS, cross_entropy
from tinyllama.ops.linear_cross_entropy import linear_cross_entropy

pytest.importorskip("triton")

KERNELS = linear_cross_entropy["triton"].call
IN_CHUNKS = [
    case
    for case in op_cases([linear_cross_entropy], providers=["triton"])
    if case.dtype is not torch.float16 and case.case.params.get("reduction") != "none"
]


@pytest.fixture
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is in chunks at every size; with a parameter of 2^26, at none that is here."""
    monkeypatch.setattr(linear_file, "LOGITS_AT_ONCE", getattr(request, "param", 0))


in_chunks_and_whole = pytest.mark.parametrize("chunks", [0, 2**26], indirect=True)


def problem(device: torch.device, N: int = 11, D: int = 8, V: int = 40) -> list[torch.Tensor]:
    """x (N D), weight (V D), both with gradients, and targets (N)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator).to(device).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(device).requires_grad_()
    return [x, weight, torch.randint(V, (N,), generator=generator).to(device)]


# -- the loss in chunks -------------------------------------------------------------------------


@pytest.mark.parametrize("case", IN_CHUNKS, ids=str)
def test_loss_in_chunks_is_as_accurate_as_eager(
    case: OpCase, chunks: None, device: torch.device, seed: int
) -> None:
    wrong = [str(comparison) for comparison in case.compare(device, seed) if not comparison.passed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_float16_gradients_use_the_scale_of_the_loss(device: torch.device) -> None:
    """1 / N of a probability of exp(-12) is less than float16 can hold; scaled as in training it
    is not."""
    x = torch.full((256, 1), 2.0, device=device)
    weight = torch.zeros(100, 1, device=device)
    weight[0] = 6.0
    targets, scale = torch.zeros(256, dtype=torch.int64, device=device), 2.0**16
    results = []
    for call, dtype in ((KERNELS, torch.float16), (linear_file.eager, torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        results.append(torch.autograd.grad(scale * call(*leaves, targets), leaves))
    for got, exact in zip(*results, strict=True):
        assert (got.double() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("names", [(), ("x",), ("weight",)])
def test_only_wanted_gradients_are_computed(
    names: tuple[str, ...], chunks: None, device: torch.device
) -> None:
    x, weight, targets = problem(device)
    expected = torch.autograd.grad(KERNELS(x, weight, targets), [x, weight])
    leaves = [x.detach(), weight.detach()]
    for name, tensor in zip(("x", "weight"), leaves, strict=True):
        tensor.requires_grad_(name in names)
    loss = KERNELS(*leaves, targets)
    with torch.no_grad():
        torch.testing.assert_close(KERNELS(x, weight, targets), loss.detach())
    if names:
        loss.backward()
    for name, tensor, gradient in zip(("x", "weight"), leaves, expected, strict=True):
        if name in names:
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, gradient)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_gradients_follow_the_one_from_upstream(
    factor: float, chunks: None, device: torch.device
) -> None:
    """To the bit, for powers of two: in the last backward pass, which works in place, and not."""
    x, weight, targets = problem(device)
    loss = KERNELS(x, weight, targets)
    first, last = (
        torch.autograd.grad(loss, [x, weight], upstream, retain_graph=retain)
        for upstream, retain in (
            (torch.ones((), device=device), True),
            (torch.tensor(factor, device=device), False),
        )
    )
    for gradient, scaled in zip(first, last, strict=True):
        assert torch.equal(factor * gradient, scaled)


def test_autocast_decides_the_dtype(chunks: None, device: torch.device) -> None:
    x, weight, targets = problem(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = KERNELS(x, weight, targets)
    gradients = torch.autograd.grad(loss, [x, weight])
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(KERNELS(*rounded, targets), rounded)
    for gradient, want in zip(gradients, expected, strict=True):
        assert gradient.dtype is torch.float32
        assert torch.equal(gradient, want.float())


@in_chunks_and_whole
def test_targets_apart_from_each_other_give_the_loss_and_gradients_of_dense_ones(
    chunks: None, device: torch.device
) -> None:
    x, weight, dense = problem(device)
    wide = dense.new_zeros(len(dense), 3)
    wide[:, 0] = dense
    results = []
    for targets in (wide[:, 0], dense):
        loss = KERNELS(x, weight, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, [x, weight])))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_empty_batch(device: torch.device) -> None:
    x, weight, targets = problem(device, N=0, V=600)
    for call in (KERNELS, linear_cross_entropy["eager"].call):
        loss = call(x, weight, targets)
        gradients = torch.autograd.grad(loss, [x, weight])
        assert loss.isnan()
        assert [tuple(gradient.shape) for gradient in gradients] == [(0, 8), (600, 8)]


# -- options: targets that are ignored, and the reduction -----------------------------------------


def losses_of_torch(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **params: Any
) -> Any:
    return torch.nn.functional.cross_entropy(x @ weight.T, targets, **params)


@in_chunks_and_whole
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_all_targets_are_ignored_the_result_is_that_of_torch(
    reduction: str, chunks: None, device: torch.device
) -> None:
    """A mean of NaN, and gradients of 0."""
    results = []
    for call in (KERNELS, losses_of_torch):
        x, weight, targets = problem(device)
        loss = call(x, weight, targets.fill_(-100), ignore_index=-100, reduction=reduction)
        gradients = torch.autograd.grad(loss, [x, weight], torch.ones_like(loss))
        results.append((loss.detach(), *gradients))
    assert results[0][0].isnan().all() == (reduction == "mean")
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("provider", ["eager", "torch", "triton"])
def test_by_default_the_targets_that_torch_ignores_are_ignored(
    provider: str, device: torch.device
) -> None:
    results = []
    for call in (linear_cross_entropy[provider], losses_of_torch):
        x, weight, targets = problem(device)
        targets[::2] = -100
        loss = call(x, weight, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, [x, weight])))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.long
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_with_options_is_torch_s_result(
    reduction: str, chunks: None, device: torch.device
) -> None:
    compiled = torch.compile(KERNELS, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, losses_of_torch):
        x, weight, targets = problem(device)
        targets[::3] = 7
        loss = call(x, weight, targets, ignore_index=7, reduction=reduction)
        upstream = torch.arange(2.0, 2 + loss.numel(), device=device).view(loss.shape)
        results.append((loss.detach(), *torch.autograd.grad(loss, [x, weight], upstream)))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("layout", ["strided", "summed"])
def test_upstream_gradients_of_tokens_lie_anywhere(layout: str, device: torch.device) -> None:
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(5)).to(device)
    targets = torch.tensor([0, -100, 32, 5, 6], device=device)
    options: dict[str, Any] = {"ignore_index": -100, "reduction": "none"}
    wide = torch.arange(1.0, 11.0, device=device)
    upstream = wide[::2] if layout == "strided" else wide[:1].expand(5)
    gradients: list[torch.Tensor] = []
    for call in (cross_entropy["triton"], torch.nn.functional.cross_entropy):
        leaf = logits.clone().requires_grad_()
        gradients += torch.autograd.grad(call(leaf, targets, **options), leaf, upstream)
    torch.testing.assert_close(*gradients)
    assert not gradients[0][1].any()


@pytest.mark.parametrize("ignored", [-100, 2])
def test_ignored_targets_keep_the_result_on_the_device(ignored: int) -> None:
    """Tensors without data cannot be read back."""
    for op, shapes in ((cross_entropy, [(9, 50)]), (linear_cross_entropy, [(9, 4), (300, 4)])):
        leaves = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
        targets = torch.empty(9, dtype=torch.int64, device="meta")
        with recorded("sm_90") as launches:
            loss = op["triton"](*leaves, targets, ignore_index=ignored)
            torch.autograd.grad(loss, leaves, torch.empty((), device="meta"))
        assert launches


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"reduction": "average"}, "reduction is 'average': use one of mean, sum, none"),
        ({"reduction": None}, "reduction is None: use one of mean, sum, none"),
        ({"ignore_index": 1.0}, "ignore_index is 1.0: give an integer, such as -100, or None"),
        ({"ignore_index": True}, "ignore_index is True: give an integer, such as -100, or None"),
    ],
)
def test_options_that_are_wrong_are_refused_before_a_launch(
    name: str, params: dict[str, Any], said: str
) -> None:
    op = {"cross_entropy": cross_entropy, "linear_cross_entropy": linear_cross_entropy}[name]
    shapes = [(4, 3), (5, 3)][: len(op.differentiable)]
    targets = torch.zeros(4, dtype=torch.int64)
    for call in (op, op["triton"]):
        with recorded("sm_90") as launches, pytest.raises(ValueError, match=re.escape(said)):
            call(*map(torch.ones, shapes), targets, **params)
        assert not launches
