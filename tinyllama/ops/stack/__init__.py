"""A stack of L transformer blocks as one op: what a step has between its embedding and its head.

Nothing between two products is a kernel of its own: norms, rotation, activation and residual sums
are in the products' epilogues, across the blocks' borders too (see `tinyllama.ops.stack.kernels`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import dependent
from tinyllama.harness.kernels.layout import as_one, contiguous, dense_rows
from tinyllama.harness.kernels.precision import compute_dtype, rounded_copy
from tinyllama.ops.attention import attend, attend_backward, lse_dtype
from tinyllama.ops.block import Inputs as Block
from tinyllama.ops.block import Matrices, block, heads_of, stock, unfit
from tinyllama.ops.rms_norm import sum_rows
from tinyllama.ops.stack import launches
from tinyllama.ops.stack.in_one import attend as attend_in_one
from tinyllama.ops.stack.in_one import chosen
from tinyllama.ops.stack.launches import ATTENTION_GRADIENT, DOWN, MLP_GRADIENT, OUT


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


def _bytes(kind: str) -> Callable[..., float]:
    return lambda size, L, **dims: L * block.bytes[kind](size, **dims)


def _flops(kind: str) -> Callable[..., float]:
    return lambda L, **dims: L * block.flops[kind](**dims)


stack = Op(
    "stack",
    fits=unfit,
    inputs={
        name: one if name in ("x", "cos", "sin") else replace(one, shape=f"L {one.shape}")
        for name, one in block.inputs.items()  # what is a layer's own is stacked
    },
    params={"eps": 1e-5},
    outputs={"y": "B T D"},
    cases=[
        Case(L=2, B=2, T=9, D=32, Q=32, R=16, F=48, C=8),
        Case(L=1, B=1, T=33, D=48, Q=64, R=64, F=40, C=16, why="Q wider than D, no grouping"),
        Case(L=1, B=3, T=2, D=16, Q=8, R=8, F=24, C=4, why="one head"),
        Case(L=3, B=1, T=5, D=16, Q=16, R=16, F=8, C=4, why="a block between two others"),
        Case(L=1, B=2, T=32, D=64, Q=64, R=64, F=64, C=16, why="tiles that divide every size"),
    ],
    timed=[
        Case(L=2, B=4, T=64, D=128, Q=128, R=64, F=256, C=16),
        Case(L=8, B=8, T=128, D=512, Q=512, R=256, F=2048, C=32),
    ],
    slowdowns={"device_seconds": 0.10},  # gaps between short kernels are a process's own
    extremes={"tiny": {"x": normal(2e-3)}, "huge": {"x": normal(100.0)}},
    bytes={"forward": _bytes("forward"), "backward": _bytes("backward")},
    flops={"forward": _flops("forward"), "backward": _flops("backward")},
)


@stack.random_dims
def _sizes(draw: Callable[[int, int], int]) -> dict[str, int]:
    assert block.dims_of is not None
    return {"L": draw(1, 2), **block.dims_of(draw)}


def _in_turn(one: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The stack that applies a block to the result of the block before."""

    def stacked(given: Inputs, eps: float) -> torch.Tensor:
        x = given.x
        for index in range(given.w_q.shape[0]):
            x = one(*given.layer(x, index), eps=eps)
        return x

    return spread(stacked)


eager = stack.reference(_in_turn(block["eager"].call))
stack.independent("torch.nn.functional, end to end")(_in_turn(spread(stock)))


@stack.magnitude
def terms(
    upstream: dict[str, torch.Tensor], eps: float, **inputs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The magnitude of what cancels in each block (see `tinyllama.ops.block.terms`)."""
    given = Inputs(**{name: tensor.detach() for name, tensor in inputs.items()})
    xs = [given.x]
    with torch.enable_grad():
        for index in range(given.w_q.shape[0]):
            x = xs[-1].requires_grad_()
            xs.append(block["eager"].call(*given.layer(x, index), eps=eps))
        dys = torch.autograd.grad(xs[-1], xs[1:], upstream["y"])
    assert block.magnitudes is not None
    found = [
        block.magnitudes(upstream={"y": dy}, eps=eps, **given.layer(x, index)._asdict())
        for index, (x, dy) in enumerate(zip(xs, dys, strict=False))
    ]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@stack.provider(
    "fused",
    requires=("triton",),
    keep=Inputs._fields,
    saved={
        "narrow": Tensor("0"),  # the weights in autocast's dtype; empty without autocast
        "between": Tensor("L+-1 B*T D"),  # the inputs of the blocks but the first
        "low_1": Tensor("L B*T D"),
        "qkv": Tensor("L B T Q+2*R"),
        "o": Tensor("L B T Q"),
        "lse": Tensor("L B Q/2/C T", dtype_of=lse_dtype),
        "sum": Tensor("L B*T D"),
        "low_2": Tensor("L B*T D"),
        "gate_up": Tensor("L B*T 2*F"),
        "h": Tensor("L B*T F"),
        "rstd": Tensor("L 2 B*T", dtype=torch.float32),
    },
    large=(Large("B", "T*D", {"L": 1, "T": 8, "D": 64, "Q": 16, "R": 16, "F": 8, "C": 8}),),
)
class Fused:
    """Five launches for a block forward and six backward, one more for long sequences.

    Products are in autocast's dtype where it is on; the residual stream and all statistics keep
    x's dtype or float32.
    """

    @staticmethod
    def forward(given: Inputs, eps: float) -> tuple[torch.Tensor, ...]:
        x, dtype = given.x, compute_dtype(given.x)
        attention_norm, mlp_norm = dense_rows(given.attention_norm), dense_rows(given.mlp_norm)
        layers, (B, T, D), F = given.w_q.shape[0], x.shape, given.w_gate.shape[1]
        rotated = given.w_q.shape[1] + given.w_k.shape[1]
        columns, width = rotated + given.w_v.shape[1], 2 * given.cos.shape[-1]
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
        options, in_one = dependent(x.device), chosen(qkv[0], width)
        x_ND = contiguous(x).flatten(0, 1)
        squares = launches.fold(x_ND, attention_norm[0], low_1[0])
        for i, w in enumerate(matrices):
            projected = (low_1[i], w.qkv, squares, rstd[i, 0], cos, sin)
            if in_one is not None:
                attend_in_one(in_one, *projected, qkv[i], o[i], lse[i], eps)
            else:
                launches.project(*projected, qkv[i].flatten(0, 1), rotated=rotated, eps=eps)
                q, k, v = heads_of(qkv[i], given.w_q.shape[1], width)
                attend(q, k, v, into=(o[i].unflatten(-1, (-1, width)), lse[i]), options=options)
            o_NQ = o[i].flatten(0, 1)
            squares = launches.add_product(OUT, o_NQ, w.out, x_ND, total[i], mlp_norm[i], low_2[i])
            launches.gate(low_2[i], w.gate_up, squares, rstd[i, 1], gate_up[i], h[i], eps)
            if i + 1 < layers:
                x_ND, after = between[i], (attention_norm[i + 1], low_1[i + 1])
                squares = launches.add_product(DOWN, h[i], w.down, total[i], x_ND, *after)
            else:
                launches.add_product(DOWN, h[i], w.down, total[i], y.flatten(0, 1))
        return y, *saved

    @staticmethod
    def backward(grads: Grads, kept: Named, saved: Named, needs: Needs, eps: float) -> Named:
        given = Inputs(**kept)
        x, weights, narrow = given.x, given.weights, saved["narrow"]
        attention_norm, mlp_norm = dense_rows(given.attention_norm), dense_rows(given.mlp_norm)
        matrices = _views(weights, narrow) if narrow.numel() else _where_they_lie(weights)
        layers, D, dtype = len(matrices), x.shape[-1], saved["qkv"].dtype
        rows_q, width = weights[0].shape[1], 2 * given.cos.shape[-1]
        tables = contiguous(given.cos), contiguous(given.sin)
        flat = weights[0].new_empty((layers, sum(w.shape[1:].numel() for w in weights)))
        x_ND, dx_ND = contiguous(x).flatten(0, 1), contiguous(grads[0]).flatten(0, 1)
        if not layers or not x.numel():
            nothing = [torch.zeros_like(norm) for norm in (attention_norm, mlp_norm)]
            return _named(grads[0].to(x.dtype), nothing, _split(weights, flat.zero_()))
        heads = (rows_q + weights[1].shape[1]) // width
        per_head = x.new_empty((len(x_ND), heads), dtype=torch.float32)
        if not rows_q:
            per_head.zero_()  # no attention writes it

        tiles = [
            launches.tile_rows(space, like, D)
            for space, like in (
                (ATTENTION_GRADIENT, saved["qkv"][0].flatten(0, 1)),
                (MLP_GRADIENT, saved["gate_up"][0]),
            )
        ]
        allocate = x.new_empty if tiles[0] == tiles[1] else x.new_zeros
        gains = allocate((2, layers, max(tiles), D), dtype=torch.float32)
        options = dependent(x.device)
        low = None if x.dtype is dtype else dtype
        dlow = x.new_empty((layers, *x_ND.shape), dtype=dtype)  # of the output of each block
        dlow[-1].copy_(dx_ND)
        dmatrices, dweights = _views(weights, flat), _split(weights, flat)
        for i in reversed(range(layers)):
            w, names = matrices[i], ("qkv", "o", "lse", "sum", "gate_up")
            qkv, o, lse, total, gate_up = (saved[name][i] for name in names)
            dgate_up, dqkv, dout = (torch.empty_like(like) for like in (gate_up, qkv, dlow[i]))
            rstd_1, rstd_2 = saved["rstd"][i]
            parts = launches.hidden_gradient(dlow[i], w.down, gate_up, rstd_2, dgate_up)
            dsum_ND = dout if low is None else torch.empty_like(dx_ND)
            launches.norm_gradient(
                *(MLP_GRADIENT, dgate_up, w.gate_up, parts, rstd_2, total, mlp_norm[i]),
                *(dx_ND, dsum_ND, None if low is None else dout, gains[1][i]),
            )
            o_BTHK = o.unflatten(-1, (-1, width))
            attend_backward(
                launches.input_product(dout, w.out).view_as(o_BTHK),
                *(*heads_of(qkv, rows_q, width), o_BTHK, lse),
                *(*heads_of(dqkv, rows_q, width), *tables),
                scaled=(rstd_1, per_head),
                options=options,
            )
            before_ND = saved["between"][i - 1] if i else x_ND
            below_ND = dlow[i - 1] if i else None
            apart = low is not None or below_ND is None
            dx_ND = torch.empty_like(dx_ND) if apart else dlow[i - 1]
            launches.norm_gradient(
                *(ATTENTION_GRADIENT, dqkv.flatten(0, 1), w.qkv, per_head, rstd_1),
                *(before_ND, attention_norm[i], dsum_ND, dx_ND),
                *(None if low is None else below_ND, gains[0][i]),
            )
            dys = dqkv.flatten(0, 1), dout, dgate_up, dlow[i]
            xs = saved["low_1"][i], o.flatten(0, 1), saved["low_2"][i], saved["h"][i]
            dw = dmatrices[i]
            dws = dw.qkv, dw.out, dw.gate_up, dw.down
            make = partial(launches.weight_gradients, list(zip(dys, xs, dws, strict=True)))
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
