"""The forward and the backward pass over a stack, for any way to compute a block (`Way`): what is
saved, what the blocks hand to each other, and the gradients of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch

from tinyllama.harness.declare.autograd import Grads, Named
from tinyllama.harness.kernels.layout import as_one, contiguous, dense_rows
from tinyllama.harness.kernels.placed import place_for
from tinyllama.harness.kernels.precision import compute_dtype, rounded_copy
from tinyllama.ops.attention import lse_dtype
from tinyllama.ops.block import Inputs as Block
from tinyllama.ops.block import Matrices
from tinyllama.ops.rms_norm import sum_rows


class Inputs(NamedTuple):
    x: torch.Tensor  # (B T D)
    cos: torch.Tensor  # (T C), as sin
    sin: torch.Tensor
    attention_norm: torch.Tensor  # (L D), as mlp_norm
    w_q: torch.Tensor  # (L Q D)
    w_k: torch.Tensor  # (L R D), as w_v
    w_v: torch.Tensor
    w_o: torch.Tensor  # (L D Q)
    mlp_norm: torch.Tensor
    w_gate: torch.Tensor  # (L F D), as w_up
    w_up: torch.Tensor
    w_down: torch.Tensor  # (L D F)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in WEIGHTS]

    def layer(self, x: torch.Tensor, index: int) -> Block:
        """What one block takes, with its own x."""
        return Block(x, self.cos, self.sin, *(stacked[index] for stacked in self[3:]))


WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")


def heads_and_width(qkv: torch.Tensor, o: torch.Tensor, cos: torch.Tensor) -> tuple[int, int, int]:
    """Query heads, heads of keys and values, and the head dimension."""
    width = 2 * cos.shape[-1]
    n_heads = o.shape[-1] // width
    return n_heads, (qkv.shape[-1] // width - n_heads) // 2, width


class Norm(NamedTuple):
    """A norm, and what it writes."""

    gain: torch.Tensor  # (D)
    low: torch.Tensor  # (N D): x times the gain, or the norm of x itself: the way's choice
    rstd: torch.Tensor  # (N)
    eps: float


class Forward(NamedTuple):
    """What the forward pass of one block reads, then what it writes; N = B T."""

    w: Matrices
    x: torch.Tensor  # (N D)
    squares: torch.Tensor | None  # (N parts): sums of x^2, as of `launches.fold`, or what the way
    # gave for the norm of x
    cos: torch.Tensor
    sin: torch.Tensor
    mlp_norm: torch.Tensor
    after: Norm | None
    """The norm behind the block; None behind the last one."""
    eps: float
    low_1: torch.Tensor  # (N D): of the first norm; it is read
    qkv: torch.Tensor  # (B T E), and so on as they are saved
    o: torch.Tensor
    lse: torch.Tensor
    total: torch.Tensor
    low_2: torch.Tensor
    gate_up: torch.Tensor
    h: torch.Tensor
    rstd: torch.Tensor  # (2 N)
    y: torch.Tensor  # (N D)


class Backward(NamedTuple):
    """What the backward pass of one block reads, then what it writes."""

    w: Matrices
    dy: torch.Tensor  # (N D), of the residual stream
    dy_low: torch.Tensor  # (N D), the same in the products' dtype
    x: torch.Tensor  # (N D)
    cos: torch.Tensor
    sin: torch.Tensor
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    total: torch.Tensor
    gate_up: torch.Tensor
    rstd: torch.Tensor
    dgate_up: torch.Tensor
    dqkv: torch.Tensor
    dsum: torch.Tensor  # (N D)
    dout: torch.Tensor  # (N D): dsum in the products' dtype; dsum itself where that is its own
    per_head: torch.Tensor  # (N, heads)
    dx: torch.Tensor  # (N D)
    dx_low: torch.Tensor | None  # (N D): dx in the products' dtype, where that is another tensor
    gains: tuple[torch.Tensor, torch.Tensor]  # (P D) float32 for the first norm and the second

    @property
    def dsum_low(self) -> torch.Tensor | None:
        return None if self.dout is self.dsum else self.dout


Threes = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Way(Protocol):
    """How the blocks of one pass are computed. Made with x (N D) and the number of blocks."""

    def __init__(self, x_BTD: torch.Tensor, layers: int) -> None: ...

    def begin(self, x_ND: torch.Tensor, norm: Norm, columns: int) -> torch.Tensor | None:
        """Write what the norm ahead of the first product, with so many columns, writes; -> the
        squares for the first block, if the way reads any."""

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        """Write what a block writes; -> the squares for the next one, if there is one and the way
        reads any."""

    def backward(self, index: int, block: Backward) -> None:
        """Write what the backward pass of a block writes."""

    def begin_backward(self, dy_ND: torch.Tensor, low_ND: torch.Tensor) -> None:
        """Write dy, the gradient of the stack's result, in the products' dtype."""

    def weight_gradients(self, threes: Threes) -> None:
        """Write the gradients of a block's matrices, as `launches.weight_gradients` does."""

    def tile_rows(
        self, qkv_BTE: torch.Tensor, gate_up_NU: torch.Tensor, head_dim: int
    ) -> tuple[int, int]:
        """The rows P of partial sums for the gradients of a block's first gain and its second."""


def forward(given: Inputs, eps: float, way: type[Way]) -> tuple[torch.Tensor, ...]:
    x, dtype = given.x, compute_dtype(given.x)
    attention_norm, mlp_norm = dense_rows(given.attention_norm), dense_rows(given.mlp_norm)
    layers, (B, T, D), F = given.w_q.shape[0], x.shape, given.w_gate.shape[1]
    columns, width = sum(w.shape[1] for w in given.weights[:3]), 2 * given.cos.shape[-1]
    cos, sin = contiguous(given.cos), contiguous(given.sin)
    narrow, matrices = _narrowed(given.weights, dtype)

    def made(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return x.new_empty((layers, *shape), dtype=of)

    rows = B * T
    between, total = x.new_empty((max(layers - 1, 0), rows, D)), made(rows, D, of=x.dtype)
    low_1, low_2, gate_up, h = made(rows, D), made(rows, D), made(rows, 2 * F), made(rows, F)
    qkv, o = made(B, T, columns), made(B, T, given.w_q.shape[1])
    lse = made(B, given.w_q.shape[1] // width, T, of=lse_dtype(qkv))
    rstd, y = made(2, rows, of=torch.float32), x.new_empty(x.shape)
    if not h.numel():
        rstd.zero_()  # of the second norm, which no product reads
    saved = (narrow, between, low_1, qkv, o, lse, total, low_2, gate_up, h, rstd)
    if not layers or not x.numel():
        return x.clone(), *saved
    ways, x_ND = way(x, layers), contiguous(x).flatten(0, 1)
    norms = [Norm(*first, eps) for first in zip(attention_norm, low_1, rstd[:, 0], strict=True)]
    squares = ways.begin(x_ND, norms[0], columns)
    for i, w in enumerate(matrices):
        last = i + 1 == layers
        y_ND = y.flatten(0, 1) if last else between[i]
        squares = ways.forward(
            i,
            Forward(
                *(w, x_ND, squares, cos, sin, mlp_norm[i]),
                None if last else norms[i + 1],
                eps,
                *(low_1[i], qkv[i], o[i], lse[i], total[i], low_2[i], gate_up[i], h[i], rstd[i]),
                y_ND,
            ),
        )
        x_ND = y_ND
    return y, *saved


def backward(grads: Grads, kept: Named, saved: Named, way: type[Way]) -> Named:
    given = Inputs(**kept)
    x, weights, narrow = given.x, given.weights, saved["narrow"]
    attention_norm, mlp_norm = dense_rows(given.attention_norm), dense_rows(given.mlp_norm)
    matrices = _views(weights, narrow) if narrow.numel() else _where_they_lie(weights)
    layers, D, dtype = len(matrices), x.shape[-1], saved["qkv"].dtype
    rows_q, width = weights[0].shape[1], 2 * given.cos.shape[-1]
    tables = contiguous(given.cos), contiguous(given.sin)
    flat = _gradients_of(weights)
    x_ND, dx_ND = contiguous(x).flatten(0, 1), contiguous(grads[0]).flatten(0, 1)
    if not layers or not x.numel():
        nothing = [torch.zeros_like(norm) for norm in (attention_norm, mlp_norm)]
        return _named(grads[0].to(x.dtype), nothing, _split(weights, flat.zero_()))
    heads = (rows_q + weights[1].shape[1]) // width
    per_head = x.new_empty((len(x_ND), heads), dtype=torch.float32)
    if not rows_q:
        per_head.zero_()  # no attention writes it

    ways = way(x, layers)
    tiles = ways.tile_rows(saved["qkv"][0], saved["gate_up"][0], width)
    allocate = x.new_empty if tiles[0] == tiles[1] else x.new_zeros
    gains = allocate((2, layers, max(tiles), D), dtype=torch.float32)
    low = None if x.dtype is dtype else dtype
    dlow = x.new_empty((layers, *x_ND.shape), dtype=dtype)  # of the output of each block
    ways.begin_backward(dx_ND, dlow[-1])
    dmatrices, dweights = _views(weights, flat), _split(weights, flat)
    for i in reversed(range(layers)):
        names = ("qkv", "o", "lse", "sum", "gate_up")
        qkv, o, lse, total, gate_up = (saved[name][i] for name in names)
        dgate_up, dqkv, dout = (torch.empty_like(like) for like in (gate_up, qkv, dlow[i]))
        dsum_ND = dout if low is None else torch.empty_like(dx_ND)
        below_ND = dlow[i - 1] if i else None
        apart = low is not None or below_ND is None
        dy_ND, dx_ND = dx_ND, torch.empty_like(dx_ND) if apart else dlow[i - 1]
        ways.backward(
            i,
            Backward(
                *(matrices[i], dy_ND, dlow[i], saved["between"][i - 1] if i else x_ND, *tables),
                *(attention_norm[i], mlp_norm[i], qkv, o, lse, total, gate_up, saved["rstd"][i]),
                *(dgate_up, dqkv, dsum_ND, dout, per_head),
                *(dx_ND, None if low is None else below_ND, (gains[0][i], gains[1][i])),
            ),
        )
        dys = dqkv.flatten(0, 1), dout, dgate_up, dlow[i]
        xs = saved["low_1"][i], o.flatten(0, 1), saved["low_2"][i], saved["h"][i]
        dw = dmatrices[i]
        dws = dw.qkv, dw.out, dw.gate_up, dw.down
        make = partial(ways.weight_gradients, list(zip(dys, xs, dws, strict=True)))
        if _RECEIVERS:
            _RECEIVERS[-1](i, make, {name: dweight[i] for name, dweight in dweights.items()})
        else:
            make()
    summed = sum_rows(gains.flatten(0, 1), given.mlp_norm.dtype).unflatten(0, (2, -1))
    return _named(dx_ND.view_as(x), list(summed), dweights)


Receiver = Callable[[int, Callable[[], None], dict[str, torch.Tensor]], None]
_RECEIVERS: list[Receiver] = []


@contextlib.contextmanager
def receiving(receive: Receiver) -> Iterator[None]:
    """Meanwhile, call ``receive`` in each backward pass with the index of a block, a function that
    queues the kernels which make the gradients of its weights, and these gradients by name. It must
    call the function. The pass then does not read these weights again. The last block comes first.

    What the function reads must live until it has run: where that is on another stream, keep the
    function until the streams are joined."""
    _RECEIVERS.append(receive)
    try:
        yield
    finally:
        _RECEIVERS.pop()


def _gradients_of(weights: list[torch.Tensor]) -> torch.Tensor:
    """Memory for the gradients of the weights (L P), those of a block side by side."""
    layers, size = len(weights[0]), sum(w.shape[1:].numel() for w in weights)
    whole = as_one(*(w[0] for w in weights)) if layers else None
    place = None
    if whole is not None and len({w.stride(0) for w in weights}) == 1:
        shape, strides = (layers, size), (weights[0].stride(0), 1)
        place = place_for(whole.as_strided(shape, strides, whole.storage_offset()))
    return weights[0].new_empty((layers, size)) if place is None else place


def _named(dx: torch.Tensor, gains: list[torch.Tensor], dweights: Named) -> Named:
    """The gradients by name."""
    norms = dict(zip(("attention_norm", "mlp_norm"), gains, strict=True))
    return {"x": dx, **norms, **dweights}


def _split(weights: list[torch.Tensor], flat_LP: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the weights' shapes in a buffer that has those of a block side by side."""
    parts = flat_LP.split([w.shape[1:].numel() for w in weights], 1)
    shapes = (w.shape[1:] for w in weights)
    views = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
    return dict(zip(WEIGHTS, views, strict=True))


def _views(weights: list[torch.Tensor], flat_LP: torch.Tensor) -> list[Matrices]:
    """The matrices of each block in a buffer that has all seven side by side."""
    return [Matrices.of([w[i] for w in weights], flat_LP[i]) for i in range(len(flat_LP))]


def _where_they_lie(weights: list[torch.Tensor]) -> list[Matrices]:
    return [Matrices.of([w[i] for w in weights], None) for i in range(len(weights[0]))]


def _narrowed(
    weights: list[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[Matrices]]:
    """The weights in the dtype of the products (L P; empty where that is their own), and the
    matrices made of them."""
    if dtype is weights[0].dtype:
        return weights[0].new_empty(0), _where_they_lie(weights)
    sizes = [w.shape[1:].numel() for w in weights]
    whole = as_one(*(w[0] for w in weights)) if len(weights[0]) else None
    if whole is not None and len({w.stride(0) for w in weights}) == 1:
        shape, strides = (len(weights[0]), sum(sizes)), (weights[0].stride(0), 1)
        wide = whole.as_strided(shape, strides, whole.storage_offset())
        narrow = rounded_copy(wide, dtype)
        narrow = wide.to(dtype) if narrow is None else narrow
    else:
        narrow = torch.cat([w.detach().flatten(1).to(dtype) for w in weights], 1)
    return narrow, _views(weights, narrow)
