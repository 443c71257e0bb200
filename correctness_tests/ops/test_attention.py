"""What the derived cases cannot ask of the attention kernels.

Blocks of every proportion, one launch or several, scores of any size, gradients written into a
packed buffer and nowhere else, gradients left out, rows far apart.
"""

import math

import pytest
import torch

from correctness_tests.support.attention_blocks import blocks
from tinyllama.harness import Case
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import attention as attention_file
from tinyllama.ops.attention import attend, attend_backward, attention
from tinyllama.ops.rope import rotate

pytest.importorskip("triton")

B, T, H, G, K, D = 2, 37, 4, 2, 12, 16  # D: K as it is padded
LOG2_E = math.log2(math.e)


def packed(device: torch.device, tokens: int = T, dtype: torch.dtype = torch.float32) -> list:
    """A buffer (B T (H + 2G) K), and its views q (B T H K), k and v (B T G K)."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(B, tokens, H + 2 * G, K, generator=generator).to(device, dtype)
    return [buffer, *buffer.split((H, G, G), 2)]


def exact(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """do, q, k, v -> o, lse, dq, dk, dv in float64."""
    do, *inputs = (x.detach().double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    o = attention["eager"].call(q, k, v)
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthk,bshk->bhts", q, keys) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    lse = scores.masked_fill(future, -torch.inf).logsumexp(-1) * LOG2_E
    return o, lse, *torch.autograd.grad(o, (q, k, v), do)


def assert_close(actual: tuple, expected: tuple, tolerance: float = 2e-5) -> None:
    """Relative to the whole tensor: a wrong mask or index is off by more than 1e-2."""
    for tensor, exact in zip(actual, expected, strict=True):
        assert tensor.shape == exact.shape
        error = (tensor.double() - exact).norm() / exact.norm()
        assert error < tolerance, f"off by {error:.2e}"


def results(device: torch.device, tokens: int = T) -> tuple[tuple, tuple]:
    """o, lse, dq, dk, dv by the kernels, and in float64, for one group of heads.

    Past the last token inputs are NaN: what reads it shows."""
    buffer, *_ = packed(device, tokens)
    room = torch.full((B, tokens + 64, *buffer.shape[2:]), float("nan"), device=device)
    views = room[:, :tokens].copy_(buffer).split((H, G, G), 2)
    q, k, v = (x[:, :, : x.shape[2] // G] for x in views)
    do = torch.full_like(room, float("nan"))[:, :tokens, : H // G].copy_(q.flip(1))
    o, lse = attend(q, k, v)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    attend_backward(do, q, k, v, o, lse, *gradients)
    return (o, lse, *gradients), exact(do, q, k, v)


@pytest.fixture(params=["short", "long"])
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sequences count as short, or as long: each kernel has both ways."""
    if request.param == "long":
        monkeypatch.setattr(attention_file, "FEW_TOKENS", 0)
    return request.param


# -- blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "rows", "step"),
    [(37, 16, 16), (37, 16, 64), (37, 64, 16), (37, 32, 32), (48, 16, 64), (64, 64, 16)],
)
def test_blocks_of_any_proportion(
    tokens: int, rows: int, step: int, length: str, device: torch.device
) -> None:
    with blocks(rows, step):
        assert_close(*results(device, tokens))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("tokens", "rows", "step"), [(37, 16, 32), (37, 32, 16), (64, 32, 32)])
def test_products_may_read_transposes_and_come_in_another_order(
    tokens: int, rows: int, step: int, ahead: int, length: str, device: torch.device
) -> None:
    with blocks(rows, step, turn=1, ahead=ahead):
        assert_close(*results(device, tokens))


@pytest.mark.long
def test_transposes_of_every_head_and_sequence_are_found(length: str, device: torch.device) -> None:
    _, q, k, v = packed(device)
    do, gradients = q.flip(1), [torch.full_like(x, float("nan")) for x in (q, k, v)]
    with blocks(32, 16, turn=1):
        o, lse = attend(q, k, v)
        attend_backward(do, q, k, v, o, lse, *gradients)
    assert_close((o, lse, *gradients), exact(do, q, k, v))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 33])
def test_a_block_more_or_less(tokens: int, length: str, device: torch.device) -> None:
    with blocks(16, 16):
        actual, expected = results(device, tokens)
        if tokens == 1:  # dq and dk are exactly zero there
            assert max(actual[i].abs().max() for i in (2, 3)) < 1e-5
            actual, expected = (tuple(r[i] for i in (0, 1, 4)) for r in (actual, expected))
        assert_close(actual, expected)


# -- scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [30.0, 100.0])
def test_scores_of_thousands_leave_one_key(
    spread: float, length: str, device: torch.device
) -> None:
    """Weights are 0 and 1: o is a row of v, whatever the exponentials would overflow to."""
    _, q, k, v = packed(device)
    do, q, k = q.flip(1), q * spread, k * spread
    o, lse = attend(q, k, v)
    expected = exact(do, q, k, v)
    assert_close((o, lse), expected[:2], 1e-2)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    attend_backward(do, q, k, v, o, lse, *gradients)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_close((gradients[2],), (expected[4],), 1e-2)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_long_sequences_are_as_accurate_as_eager(
    dtype: torch.dtype, shift: float, device: torch.device, seed: int
) -> None:
    """The extremes of the declaration are tried on a short one; rounding must not add up."""
    case = Case(B=1, T=300, H=2, G=1, K=64, values={"k": normal(1.0, mean=shift)})
    comparisons = OpCase(attention, attention["triton"], case, dtype).compare(device, seed)
    wrong = [str(comparison) for comparison in comparisons if not comparison.passed]
    assert not wrong, "\n".join(wrong)


# -- memory -----------------------------------------------------------------------------------


def test_gradients_fill_a_packed_buffer_and_nothing_beside_it(
    length: str, device: torch.device
) -> None:
    buffer, q, k, v = packed(device)
    guarded = torch.full((B + 2, T, H + 2 * G + 2, K), 7.0, device=device)
    inside = guarded[1:-1, :, 1:-1]
    inside.fill_(float("nan"))
    before = buffer.clone(), layout.copies
    do = packed(device)[1].flip(1)
    o, lse = attend(q, k, v)
    attend_backward(do, q, k, v, o, lse, *inside.split((H, G, G), 2))
    assert torch.equal(buffer, before[0])
    assert layout.copies == before[1]
    assert_close(tuple(inside.split((H, G, G), 2)), exact(do, q, k, v)[2:])
    inside.fill_(7.0)
    assert (guarded == 7.0).all()
    assert o.is_contiguous()


def test_rows_are_scaled_and_their_sums_written(length: str, device: torch.device) -> None:
    """And nothing behind the last row."""
    buffer, q, k, v = packed(device)
    rstd = torch.rand(B, T, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    o, lse = attend(q, k, v)
    unscaled, scaled = torch.empty_like(buffer), torch.full_like(buffer, float("nan"))
    parts = torch.full((B + 1, T, H + G), 7.0, device=device)
    attend_backward(o.flip(1), q, k, v, o, lse, *unscaled.split((H, G, G), 2))
    dq, dk, dv = scaled.split((H, G, G), 2)
    attend_backward(o.flip(1), q, k, v, o, lse, dq, dk, dv, scaled=(rstd, parts[:B].flatten(0, 1)))
    assert_close((scaled,), (unscaled.double() * rstd[:, :, None, None],), tolerance=1e-6)
    shares = [(x.double() * dx).sum(-1) for x, dx in ((q, dq), (k, dk), (v, dv))]
    sums = torch.cat([shares[0], shares[1] + shares[2]], -1)
    assert (parts[:B] - sums).abs().max() < 1e-5 * sums.abs().max()
    assert (parts[B] == 7.0).all()


@pytest.mark.parametrize("names", ["q", "kv"])
def test_gradients_may_be_wanted_alone(names: str, length: str, device: torch.device) -> None:
    _, q, k, v = packed(device)
    do, (o, lse) = q.flip(1), attend(q, k, v)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    asked_for = [dx if name in names else None for name, dx in zip("qkv", gradients, strict=True)]
    with blocks(16, 16):
        attend_backward(do, q, k, v, o, lse, *asked_for)
    some = slice(0, 1) if names == "q" else slice(1, 3)
    assert_close(tuple(gradients[some]), exact(do, q, k, v)[2:][some])


@pytest.mark.long
def test_gradients_go_back_through_the_rotation(length: str, device: torch.device) -> None:
    buffer, q, k, v = packed(device)
    angles = torch.randn(T, K // 2, generator=torch.Generator().manual_seed(1)).to(device)
    tables = angles.cos(), angles.sin()
    o, lse = attend(q, k, v)
    unrotated, rotated = torch.empty_like(buffer), torch.full_like(buffer, float("nan"))
    attend_backward(o.flip(1), q, k, v, o, lse, *unrotated.split((H, G, G), 2))
    dq, dk, dv = rotated.split((H, G, G), 2)
    attend_backward(o.flip(1), q, k, v, o, lse, dq, dk, dv, *tables)
    dq, dk, _ = unrotated.split((H, G, G), 2)
    rotate(dq, dk, *tables, dq, dk, inverse=True)
    assert_close((rotated,), (unrotated.double(),), tolerance=1e-6)


def test_every_tensor_has_strides_of_its_own(length: str, device: torch.device) -> None:
    """Those of one used for another: dO read as o is, dv written as dk is."""

    def with_gaps(x: torch.Tensor, gap: int, order: tuple[int, ...]) -> torch.Tensor:
        """x with its axes in this order in memory, and a gap behind the last."""
        room = x.new_full((*(x.shape[i] for i in order), K + gap), float("nan"))
        view = room[..., :K].permute(*(order.index(i) for i in range(3)), 3)
        return view.copy_(x)

    orders = ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1))
    _, q, k, v = packed(device)
    tensors = (q.flip(1), q, k, v)
    do, q, k, v = (with_gaps(x, 16 * (i + 1), orders[i]) for i, x in enumerate(tensors))
    dq, dk, dv = (
        with_gaps(torch.full_like(x, float("nan")), 16 * (i + 5), orders[i])
        for i, x in enumerate((q, k, v))
    )
    before = layout.copies
    o, lse = attend(q, k, v)
    attend_backward(do, q, k, v, o, lse, dq, dk, dv)
    assert layout.copies == before
    assert_close((o, lse, dq, dk, dv), exact(do, q, k, v))


def test_tokens_too_far_apart_are_brought_together() -> None:
    """Within a block offsets have 32 bits."""
    size, stride = (1, 16, 1, K), (0, 2**28, K, 1)
    q, k, v = (torch.empty_strided(size, stride, device="meta") for _ in range(3))
    before = layout.copies
    with recorded("sm_90") as noted:
        attend(q, k, v)
    assert layout.copies == before + 3
    assert noted[-1].arguments["q_t"] == K


def test_operands_of_several_dtypes_are_read_as_the_widest(device: torch.device) -> None:
    _, q, k, v = packed(device)
    v = v.to(torch.bfloat16)
    o, lse = attend(q, k, v)
    do = packed(device)[1].flip(1)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    attend_backward(do, q, k, v, o, lse, *gradients)
    assert (o.dtype, gradients[2].dtype) == (torch.float32, torch.bfloat16)
    expected = exact(do, q, k, v)
    assert_close((o, lse, *gradients[:2]), expected[:4])
    assert_close((gradients[2],), expected[4:], 1e-2)


def test_what_cannot_be_done_is_refused(device: torch.device) -> None:
    wide = torch.zeros(1, 2, 1, 257, device=device)
    with pytest.raises(ValueError, match="head dimension 257: up to 256 is supported"):
        attend(wide, wide, wide)
    assert attention["triton"].supports({"K": 257}) is not None
    x = torch.zeros(1, 2, 1, K, device=device)
    o, lse = attend(x, x, x)
    strided = torch.zeros(1, 2, 1, 2 * K, device=device)[..., ::2]
    with pytest.raises(ValueError, match="dense last axis"):
        attend_backward(x, x, x, x, o, lse, strided, x.clone(), x.clone())
