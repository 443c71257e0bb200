"""Rotary position embedding (Su et al., arXiv 2104.09864).

Pair i of a head of K elements, at position t, is rotated by the angle t * theta^(-2i / K). A pair
is (x[2i], x[2i + 1]), as in the paper, or with ``interleaved=False`` (x[i], x[i + K / 2]), as in
Hugging Face's checkpoints. The tables of cosines and sines are inputs: they are made once, in
float64, and stay float32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Named, Needs, SomeGrads
from tinyllama.harness.declare.values import Values, normal
from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import contiguous, dense_rows
from tinyllama.harness.kernels.precision import SHORT

Pair = tuple[torch.Tensor, torch.Tensor]


def rope_tables(
    length: int, head_dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> Pair:
    """cos, sin (T C) for positions 0 to length - 1 and C = head_dim / 2 pairs."""
    exponent_C = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle_TC = torch.outer(torch.arange(length, dtype=torch.float64), theta**-exponent_C)
    return angle_TC.cos().to(dtype), angle_TC.sin().to(dtype)


def _table(which: int) -> Values:
    def sample(shape: tuple[int, ...], _: torch.Generator) -> torch.Tensor:
        return rope_tables(shape[0], 2 * shape[1], dtype=torch.float64)[which]

    return Values(("cos", "sin")[which], sample)


COS = Tensor("T C", dtype=torch.float32, values=_table(0))
SIN = Tensor("T C", dtype=torch.float32, values=_table(1))


def _unlike(sizes: Mapping[str, Any]) -> str | None:
    """That tables (T C) do not fit heads of K elements; None when they do."""
    K, C = sizes["K"], sizes["C"]
    if 2 * C == K:
        return None
    return (
        f"tables of width {C} do not fit heads of width {K}: a column for each pair, K / 2, as "
        "rope_tables makes them"
    )


rope = Op(
    "rope",
    fits=_unlike,
    inputs={
        "q": Tensor("B T H K", grad=True),
        "k": Tensor("B T G K", grad=True),
        "cos": COS,
        "sin": SIN,
    },
    outputs={"q_rotated": "B T H K", "k_rotated": "B T G K"},
    params={"interleaved": True},
    cases=[
        Case(B=2, T=5, H=4, G=2, K=16, C=8),
        Case(B=1, T=1, H=2, G=1, K=8, C=4, why="position 0 alone: the identity"),
        Case(B=1, T=9, H=1, G=1, K=2, C=1, why="one head, one pair"),
        Case(B=1, T=33, H=3, G=3, K=20, C=10, why="no grouping, ragged head width"),
        Case(B=1, T=257, H=2, G=1, K=8, C=4, why="angles of many turns"),
        Case(B=1, T=2, H=20, G=5, K=128, C=64, why="heads that fill more than one tile"),
        Case(B=1, T=3, H=2, G=1, K=256, C=128, why="the widest heads"),
        Case(B=2, T=5, H=4, G=2, K=20, C=10, params={"interleaved": False}, why="pairs of halves"),
    ],
    timed=[
        Case(B=4, T=64, H=4, G=2, K=32, C=16),
        Case(B=8, T=128, H=8, G=4, K=64, C=32),
        Case(B=4, T=4096, H=32, G=8, K=128, C=64),
    ],
    extremes={"huge": {"q": normal(300.0), "k": normal(300.0)}},
    bytes={
        "forward": lambda size, B, T, H, G, K, C: 2 * B * T * (H + G) * K * size + 8 * T * C,
        "backward": lambda size, B, T, H, G, K, C: 2 * B * T * (H + G) * K * size + 8 * T * C,
    },
    flops={
        "forward": lambda B, T, H, G, K, C: 6 * B * T * (H + G) * C,
        "backward": lambda B, T, H, G, K, C: 6 * B * T * (H + G) * C,
    },
)


@rope.random_dims
def _grouped_heads(draw: Callable[[int, int], int]) -> dict[str, int]:
    """Whole groups of query heads, and the dimensions that follow from a head's."""
    groups, pairs = draw(1, 2), draw(1, 20)
    sizes = {"B": draw(1, 2), "T": draw(1, 40), "H": groups * draw(1, 3), "G": groups}
    return {**sizes, "K": 2 * pairs, "C": pairs}


def _rotate(
    x_BTHK: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    if not interleaved:
        low, high = x_BTHK.chunk(2, -1)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), -1).to(x_BTHK.dtype)
    even, odd = x_BTHK[..., 0::2], x_BTHK[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return pairs.flatten(-2).to(x_BTHK.dtype)


@rope.reference
def eager(
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    interleaved: bool = True,
) -> Pair:
    """q (B T H K), k (B T G K), tables (T C) -> both rotated, in their own dtype."""
    tables = cos_TC, sin_TC, interleaved
    return _rotate(q_BTHK, *tables), _rotate(k_BTGK, *tables)


def _paired(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (... K) -> its pairs (... C 2)."""
    return x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)


def _flat(pairs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs (... C 2) -> (... K), what `_paired` undoes."""
    return (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)


@rope.provider("torch")
def complex_product(
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    interleaved: bool = True,
) -> Pair:
    """A rotation is a product with a complex number: one kernel for the arithmetic."""
    turn_T1C = torch.complex(cos_TC, sin_TC)[:, None]

    def rotate_complex(x_BTHK: torch.Tensor) -> torch.Tensor:
        wide = _paired(x_BTHK.to(cos_TC.dtype), interleaved).contiguous()
        pairs = torch.view_as_real(torch.view_as_complex(wide) * turn_T1C)
        return _flat(pairs, interleaved).to(x_BTHK.dtype)

    return rotate_complex(q_BTHK), rotate_complex(k_BTGK)


@rope.independent("matrix_exp of the rotation's generator")
def exponential(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> Pair:
    """exp([[0, -a], [a, 0]]) is the rotation by a; the angle follows from the tables."""
    angle_TC = torch.atan2(sin, cos)
    generator = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=q.dtype, device=q.device)
    turn_TC22 = torch.linalg.matrix_exp(angle_TC[..., None, None] * generator)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.einsum("tcij,bthcj->bthci", turn_TC22, _paired(x, interleaved))
        return _flat(pairs, interleaved)

    return rotate(q), rotate(k)


# -- Triton -------------------------------------------------------------------------------------


@jit
def _turn_heads(
    x, out, batch, time, inside, cos, sin, n_heads, width,
    strides, out_strides,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of some tokens. batch, time, inside: (tokens); cos, sin: (tokens, pairs);
    strides: of batch, time and head.

    Whole rows are read and written; pairs are split in registers.
    """
    columns = tl.arange(0, WIDTH)[None, None, :]
    batch, time = batch.to(tl.int64)[:, None, None], time.to(tl.int64)[:, None, None]
    at = batch * strides[0] + time * strides[1]
    to = batch * out_strides[0] + time * out_strides[1]
    within = inside[:, None, None] & (columns < width)
    cos, sin = cos[:, None, :], sin[:, None, :]
    for first in range(0, n_heads, HEADS):
        heads = first + tl.arange(0, HEADS)
        mask = within & (heads < n_heads)[None, :, None]
        heads = heads.to(tl.int64)[None, :, None]
        wide = tl.load(x + (at + heads * strides[2]) + columns, mask=mask, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(wide, (TOKENS, HEADS, WIDTH // 2, 2)))
        pairs = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        turned = tl.reshape(pairs, (TOKENS, HEADS, WIDTH)).to(out.dtype.element_ty)
        tl.store(out + (to + heads * out_strides[2]) + columns, turned, mask=mask)


@jit
def _turn_halves(
    x, out, batch, time, inside, cos, sin, n_heads, width,
    strides, out_strides,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As `_turn_heads`, where a pair is one element of each half: the halves are read and written
    one after the other."""
    half = width // 2
    columns = tl.arange(0, WIDTH // 2)[None, None, :]
    batch, time = batch.to(tl.int64)[:, None, None], time.to(tl.int64)[:, None, None]
    at = batch * strides[0] + time * strides[1]
    to = batch * out_strides[0] + time * out_strides[1]
    within = inside[:, None, None] & (columns < half)
    cos, sin = cos[:, None, :], sin[:, None, :]
    for first in range(0, n_heads, HEADS):
        heads = first + tl.arange(0, HEADS)
        mask = within & (heads < n_heads)[None, :, None]
        heads = heads.to(tl.int64)[None, :, None]
        row = x + (at + heads * strides[2]) + columns
        out_row = out + (to + heads * out_strides[2]) + columns
        low = tl.load(row, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(row + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_row, (low * cos - high * sin).to(out.dtype.element_ty), mask=mask)
        tl.store(out_row + half, (low * sin + high * cos).to(out.dtype.element_ty), mask=mask)


@jit
def rotate_kernel(
    q, k, cos, sin, q_out, k_out, n_tokens, length, n_q, n_k, width,
    stride_qb, stride_qt, stride_qh, stride_qob, stride_qot, stride_qoh,
    stride_kb, stride_kt, stride_kh, stride_kob, stride_kot, stride_koh,
    TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All heads of q and k of TOKENS tokens, for which the tables are read once; a q or k that is
    None is skipped."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < n_tokens
    batch, time = tokens // length, tokens % length
    pairs = tl.arange(0, WIDTH // 2)
    place = time.to(tl.int64)[:, None] * (width // 2) + pairs[None, :]
    mask = inside[:, None] & (pairs < width // 2)[None, :]
    cosine = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sine = -sine
    if q is not None:
        q_strides = (stride_qb, stride_qt, stride_qh)
        q_out_strides = (stride_qob, stride_qot, stride_qoh)
        if INTERLEAVED:
            _turn_heads(
                q, q_out, batch, time, inside, cosine, sine, n_q, width, q_strides, q_out_strides,
                TOKENS, Q_HEADS, WIDTH,
            )  # fmt: skip
        else:
            _turn_halves(
                q, q_out, batch, time, inside, cosine, sine, n_q, width, q_strides, q_out_strides,
                Q_HEADS, WIDTH,
            )  # fmt: skip
    if k is not None:
        k_strides = (stride_kb, stride_kt, stride_kh)
        k_out_strides = (stride_kob, stride_kot, stride_koh)
        if INTERLEAVED:
            _turn_heads(
                k, k_out, batch, time, inside, cosine, sine, n_k, width, k_strides, k_out_strides,
                TOKENS, K_HEADS, WIDTH,
            )  # fmt: skip
        else:
            _turn_halves(
                k, k_out, batch, time, inside, cosine, sine, n_k, width, k_strides, k_out_strides,
                K_HEADS, WIDTH,
            )  # fmt: skip


def _rotation(H: int, G: int, K: int, elements: int, num_warps: int) -> Config:
    """Tiles of about ``elements`` elements: some heads of one token, or all heads of several."""
    q_heads, k_heads = (min(heads, max(elements // K, 1)) for heads in (H, G))
    tokens = min(max(elements // (q_heads * K), 1), 16)
    return Config(TOKENS=tokens, Q_HEADS=q_heads, K_HEADS=k_heads, num_warps=num_warps)


def _rotation_of(H: int, G: int, K: int, dtype: str) -> Config:
    """Chosen so that no chip's compiler spills."""
    if H * K >= 2048:
        return _rotation(H, G, K, 2048, 4)
    return _rotation(H, G, K, max(H * K, 512), 2 if H * K >= 512 else 4)


ROTATE = Space(
    "rope.rotate",
    default=_rotation_of,
    configs=lambda H, G, K, dtype: list(
        dict.fromkeys(
            _rotation(H, G, K, elements, warps)
            for elements in (512, 1024, 2048, 4096)
            for warps in (1, 2, 4, 8)
            if elements // warps <= 1024
        )
    ),
)


def rotate(
    q_BTHK: torch.Tensor | None,
    k_BTGK: torch.Tensor | None,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    q_out_BTHK: torch.Tensor | None,
    k_out_BTGK: torch.Tensor | None,
    inverse: bool = False,
    interleaved: bool = True,
) -> None:
    """Write q (B T H K) and k (B T G K), rotated by the tables (T C), into q_out and k_out.

    Any strides in and out (of the outputs, the last is 1), views of one packed buffer among them;
    an output may be its own input. inverse: rotate back, which is also the gradient. interleaved:
    pairs are neighbours, else of the two halves of a head. None for q and q_out, or for k and
    k_out, skips that tensor. One launch.
    """
    q, q_out, n_q, q_strides = _rows(q_BTHK, q_out_BTHK)
    k, k_out, n_k, k_strides = _rows(k_BTGK, k_out_BTGK)
    first = k if q is None else q
    if first is None:
        return
    B, T, _, K = first.shape
    key = {"H": next_power_of_2(n_q), "G": next_power_of_2(n_k), "K": next_power_of_2(K)}
    config = ROTATE.choose(first.device, **key, dtype=SHORT[first.dtype])
    rotate_kernel[(cdiv(B * T, config["TOKENS"]),)](
        q, k, contiguous(cos_TC), contiguous(sin_TC), q_out, k_out, B * T, T, n_q, n_k, K,
        *q_strides, *k_strides,
        WIDTH=key["K"], INVERSE=inverse, INTERLEAVED=interleaved, **config.kwargs(),
    )  # fmt: skip


Rows = tuple[torch.Tensor | None, torch.Tensor | None, int, tuple[int, ...]]


def _rows(x: torch.Tensor | None, out: torch.Tensor | None) -> Rows:
    """x with dense rows, its output, how many heads they have, and the strides of batch, time and
    head of both."""
    if x is None or out is None or not x.numel():
        return None, None, 0, (0,) * 6
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(
            f"rotate writes dense rows, the output has strides {out.stride()}: make the last one 1"
        )
    x = dense_rows(x)
    return x, out, x.shape[2], (*x.stride()[:3], *out.stride()[:3])


@rope.provider(
    "triton",
    keep=("cos", "sin"),
    reads={"cos": contiguous, "sin": contiguous},
    saved={"heads": Tensor("H G 0")},
    requires=("triton",),
    replays=True,
    large=(Large("B", "T*G*K", {"T": 3, "H": 2, "G": 2, "K": 64, "C": 32}),),
)
class Triton:
    """One launch for q and k, forward and backward; the gradient is the inverse rotation."""

    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        rotate(q, k, cos, sin, q_out, k_out, interleaved=interleaved)
        heads = q.new_empty((q.shape[2], k.shape[2], 0))  # read for its shape alone
        return q_out, k_out, heads

    @staticmethod
    def backward(
        grads: SomeGrads, inputs: Named, saved: Named, needs: Needs, interleaved: bool
    ) -> Named:
        any_grad = next(grad for grad in grads if grad is not None)
        B, T, _, K = any_grad.shape
        gradients: dict[str, torch.Tensor] = {}
        turned: dict[str, torch.Tensor] = {}
        for name, grad, heads in zip(("q", "k"), grads, saved["heads"].shape[:2], strict=True):
            if name in needs and grad is None:
                gradients[name] = any_grad.new_zeros((B, T, heads, K))
            elif name in needs and grad is not None:
                turned[name] = grad
                gradients[name] = grad.new_empty((B, T, heads, K))  # q and k may differ in dtype
        tables, outputs = (inputs["cos"], inputs["sin"]), (gradients.get("q"), gradients.get("k"))
        rotate(turned.get("q"), turned.get("k"), *tables, *outputs, True, interleaved)
        return gradients
