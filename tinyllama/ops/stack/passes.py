"""The forward and the backward pass over a stack, for any way to compute a block (`Way`): what is
saved, what the blocks hand to each other, and the gradients of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch

from tinyllama.harness.declare.autograd import Grads, Named
from tinyllama.harness.declare.custom_op import shapes_are_fixed
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.kernels.precision import compute_dtype
from tinyllama.ops.attention import lse_dtype
from tinyllama.ops.block.matrices import Matrices
from tinyllama.ops.block.passes import WEIGHTS
from tinyllama.ops.block.passes import Inputs as Block
from tinyllama.ops.rms_norm import sum_rows
from tinyllama.ops.stack.weights import (
    gradients_of,
    narrowed,
    split,
    transposes_of,
    turned_copy,
    views,
    where_they_lie,
)


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
    turned: torch.Tensor | None = None  # (D N): the memory for low^T, where it is to be written


class Turned(NamedTuple):
    """The transposes (columns N) of what the gradients of a block's matrices are made of."""

    low_1: torch.Tensor
    o: torch.Tensor
    low_2: torch.Tensor
    h: torch.Tensor
    qkv: torch.Tensor | None  # where attention reads its transpose


class TurnedGradients(NamedTuple):
    """What a backward pass from transposes reads, and then the transposes (columns N) that it
    writes."""

    w: Matrices  # each as its transpose
    qkv: torch.Tensor | None
    dqkv: torch.Tensor
    dout: torch.Tensor
    dgate_up: torch.Tensor
    dx: torch.Tensor | None  # None: of the first block, where nobody reads it


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
    turned: Turned | None = None
    """The memory for transposes, where the backward pass reads them."""


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
    h: torch.Tensor | None = None  # (N F): the memory for h, where it was not kept
    turned: TurnedGradients | None = None

    @property
    def dsum_low(self) -> torch.Tensor | None:
        return None if self.dout is self.dsum else self.dout


Threes = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Way(Protocol):
    """How the blocks of one pass are computed. Made with x (N D) and the number of blocks."""

    def __init__(self, x_BTD: torch.Tensor, layers: int) -> None: ...

    @staticmethod
    def turns(x: torch.Tensor, dtype: torch.dtype) -> int:
        """Whether gradients of rows of x (... D), with products in ``dtype``, come from
        transposes; 2: attention's products as well."""

    @classmethod
    def keeps_h(cls, low_ND: torch.Tensor, columns: int) -> bool:
        """Whether h (N columns) of each block is kept; else the backward pass computes it again."""

    def begin(self, x_ND: torch.Tensor, norm: Norm, columns: int) -> torch.Tensor | None:
        """Write what the norm ahead of the first product, with so many columns, writes; -> the
        squares for the first block, if the way reads any."""

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        """Write what a block writes; -> the squares for the next one, if there is one and the way
        reads any."""

    def backward(self, index: int, block: Backward) -> None:
        """Write what the backward pass of a block writes."""

    def begin_backward(
        self, dy_ND: torch.Tensor, low_ND: torch.Tensor, low_DN: torch.Tensor | None
    ) -> None:
        """Write dy, the gradient of the stack's result, in the products' dtype; and its transpose
        where memory for it is given."""

    def weight_gradients(self, threes: Threes, turned: bool) -> None:
        """Write the gradients of a block's matrices, as `launches.weight_gradients` does."""

    def tile_rows(
        self, qkv_BTE: torch.Tensor, gate_up_NU: torch.Tensor, head_dim: int
    ) -> tuple[int, int]:
        """The rows P of partial sums for the gradients of a block's first gain and its second."""


def forward(inputs: Inputs, eps: float, way: type[Way]) -> tuple[torch.Tensor, ...]:
    x, dtype = inputs.x, compute_dtype(inputs.x)
    attention_norm, mlp_norm = inputs.attention_norm, inputs.mlp_norm
    layers, (B, T, D), F = inputs.w_q.shape[0], x.shape, inputs.w_gate.shape[1]
    columns, width = sum(w.shape[1] for w in inputs.weights[:3]), 2 * inputs.cos.shape[-1]
    narrow, matrices = narrowed(inputs.weights, dtype)

    def by_layer(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return x.new_empty((layers, *shape), dtype=of)

    rows = B * T
    between, total = x.new_empty((max(layers - 1, 0), rows, D)), by_layer(rows, D, of=x.dtype)
    low_1, low_2, gate_up = by_layer(rows, D), by_layer(rows, D), by_layer(rows, 2 * F)
    qkv, o = by_layer(B, T, columns), by_layer(B, T, inputs.w_q.shape[1])
    lse = by_layer(B, inputs.w_q.shape[1] // width, T, of=lse_dtype(qkv))
    rstd, y = by_layer(2, rows, of=torch.float32), x.new_empty(x.shape)
    if not gate_up.numel():
        rstd.zero_()  # of the second norm, which no product reads
    empty = bool(not layers or not x.numel())
    fixed = empty or shapes_are_fixed()
    turns = 0 if fixed else way.turns(x, dtype)
    if fixed or turns or layers == 1 or way.keeps_h(low_2[0], F):
        h = by_layer(rows, F)
    else:  # all blocks share it: stride 0 tells the backward pass that h was not kept
        h = x.new_empty((rows, F), dtype=dtype).expand(layers, rows, F)
    # That it is no vector says to the backward pass that transposes were kept.
    o_turned = by_layer(o.shape[3], rows) if turns else x.new_empty(0)
    qkv_turned = by_layer(columns, rows) if turns > 1 else x.new_empty(0)
    turned_weights = turned_copy(inputs.weights) if turns else x.new_empty(0)
    saved = (
        *(narrow, between, low_1, qkv, o, lse, total, low_2, gate_up, h, rstd),
        *(o_turned, qkv_turned, turned_weights),
    )
    if empty:
        return x.clone(), *saved
    ways, x_ND = way(x, layers), x.flatten(0, 1)
    each_turned: list[Turned | None] = [None] * layers
    if turns:  # only the transposes are kept
        transposes = [tensor.view(layers, -1, rows) for tensor in (low_1, o_turned, low_2, h)]
        of_qkv = qkv_turned if turns > 1 else (None,) * layers
        each_turned = [Turned(*of_block) for of_block in zip(*transposes, of_qkv, strict=True)]
        low_1, low_2, h = (
            torch.empty_like(tensor[0]).expand_as(tensor) for tensor in (low_1, low_2, h)
        )
    norms = [
        Norm(attention_norm[i], low_1[i], rstd[i, 0], eps, turned and turned.low_1)
        for i, turned in enumerate(each_turned)
    ]
    squares = ways.begin(x_ND, norms[0], columns)
    for i, w in enumerate(matrices):
        last = i + 1 == layers
        y_ND = y.flatten(0, 1) if last else between[i]
        squares = ways.forward(
            i,
            Forward(
                *(w, x_ND, squares, inputs.cos, inputs.sin, mlp_norm[i]),
                None if last else norms[i + 1],
                eps,
                *(low_1[i], qkv[i], o[i], lse[i], total[i], low_2[i], gate_up[i], h[i], rstd[i]),
                *(y_ND, each_turned[i]),
            ),
        )
        x_ND = y_ND
    return y, *saved


def backward(grads: Grads, inputs_by_name: Named, saved: Named, way: type[Way]) -> Named:
    inputs = Inputs(**inputs_by_name)
    x, weights, narrow = inputs.x, inputs.weights, saved["narrow"]
    attention_norm, mlp_norm = inputs.attention_norm, inputs.mlp_norm
    matrices = views(weights, narrow) if narrow.numel() else where_they_lie(weights)
    layers, D, dtype = len(matrices), x.shape[-1], saved["qkv"].dtype
    rows_q, width = weights[0].shape[1], 2 * inputs.cos.shape[-1]
    tables = inputs.cos, inputs.sin
    flat = gradients_of(weights)
    x_ND, dx_ND = x.flatten(0, 1), contiguous(grads[0]).flatten(0, 1)
    if not layers or not x.numel():
        nothing = [torch.zeros_like(norm) for norm in (attention_norm, mlp_norm)]
        return _named(grads[0].to(x.dtype), nothing, split(weights, flat.zero_()))
    heads = (rows_q + weights[1].shape[1]) // width
    per_head = x.new_empty((len(x_ND), heads), dtype=torch.float32)
    if not rows_q:
        per_head.zero_()  # no attention writes it

    ways = way(x, layers)
    tiles = ways.tile_rows(saved["qkv"][0], saved["gate_up"][0], width)
    allocate = x.new_empty if tiles[0] == tiles[1] else x.new_zeros
    gains = allocate((2, layers, max(tiles), D), dtype=torch.float32)
    low = None if x.dtype is dtype else dtype
    low_ND = x.new_empty(x_ND.shape, dtype=dtype)  # of the output of block i, as dx
    turns, rows = saved["o_turned"].dim() > 1, len(x_ND)
    again = layers > 1 and not saved["h"].stride(0)

    def transpose_of(like: torch.Tensor) -> torch.Tensor:
        """The memory for the transpose of a tensor (... columns)."""
        return like.new_empty((like.shape[-1], rows))

    dy_turned = transpose_of(low_ND) if turns else None
    ways.begin_backward(dx_ND, low_ND, dy_turned)
    transposes = transposes_of(matrices, saved["turned_weights"]) if turns else []
    dmatrices, dweights = views(weights, flat), split(weights, flat)
    for i in reversed(range(layers)):
        names = ("qkv", "o", "lse", "sum", "gate_up")
        qkv, o, lse, total, gate_up = (saved[name][i] for name in names)
        dgate_up, dqkv, dout = (torch.empty_like(like) for like in (gate_up, qkv, low_ND))
        dsum_ND = dout if low is None else torch.empty_like(dx_ND)
        dy_ND, dx_ND = dx_ND, torch.empty_like(dx_ND)
        below_ND = dx_ND if low is None else torch.empty_like(low_ND) if i else None
        h_NF = torch.empty_like(saved["h"][i]) if again else None
        turned = None
        if turns:
            of_qkv = saved["qkv_turned"][i] if saved["qkv_turned"].dim() > 1 else None
            turned = TurnedGradients(
                *(transposes[i](), of_qkv),
                *(transpose_of(dqkv), transpose_of(dout), transpose_of(dgate_up)),
                transpose_of(dx_ND) if i else None,
            )
        ways.backward(
            i,
            Backward(
                *(matrices[i], dy_ND, low_ND, saved["between"][i - 1] if i else x_ND, *tables),
                *(attention_norm[i], mlp_norm[i], qkv, o, lse, total, gate_up, saved["rstd"][i]),
                *(dgate_up, dqkv, dsum_ND, dout, per_head),
                *(dx_ND, None if low is None else below_ND, (gains[0][i], gains[1][i])),
                *(h_NF, turned),
            ),
        )
        dys = [dqkv.flatten(0, 1), dout, dgate_up, low_ND]
        h_NF = saved["h"][i] if h_NF is None else h_NF
        xs = [saved["low_1"][i], o.flatten(0, 1), saved["low_2"][i], h_NF]
        if turned is not None and dy_turned is not None:
            dys = [turned.dqkv, turned.dout, turned.dgate_up, dy_turned]
            of_x = ("low_1", "o_turned", "low_2", "h")
            xs = [saved[name][i].view(-1, rows) for name in of_x]
            dy_turned = turned.dx
        dw = dmatrices[i]
        dws = dw.qkv, dw.out, dw.gate_up, dw.down
        make = partial(ways.weight_gradients, list(zip(dys, xs, dws, strict=True)), turns)
        if _RECEIVERS:
            _RECEIVERS[-1](i, make, {name: dweight[i] for name, dweight in dweights.items()})
        else:
            make()
        if below_ND is not None:
            low_ND = below_ND
    summed = sum_rows(gains.flatten(0, 1), inputs.mlp_norm.dtype).unflatten(0, (2, -1))
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


def _named(dx: torch.Tensor, gains: list[torch.Tensor], dweights: Named) -> Named:
    """The gradients by name."""
    norms = dict(zip(("attention_norm", "mlp_norm"), gains, strict=True))
    return {"x": dx, **norms, **dweights}
