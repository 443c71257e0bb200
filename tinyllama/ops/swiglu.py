"""SwiGLU: h = silu(x Wg^T) * (x Wu^T), silu(a) = a sigmoid(a)  (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.cases import SHORT
from tinyllama.harness.configs import Config, Space
from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, tl
from tinyllama.harness.layout import as_one, contiguous, dense_rows
from tinyllama.harness.precision import compute_dtype, product
from tinyllama.harness.values import normal

swiglu = Op(
    "swiglu",
    inputs={
        "x": Tensor("B T D", grad=True),
        "w_gate": Tensor("F D", grad=True, values=normal(0.2)),
        "w_up": Tensor("F D", grad=True, values=normal(0.2)),
    },
    outputs={"h": "B T F"},
    cases=[
        Case(B=2, T=3, D=32, F=24),  # small: the naive kernel is interpreted element by element
        Case(B=1, T=1, D=16, F=33, why="one row, ragged width"),
        Case(B=1, T=130, D=20, F=4, why="many rows: the weight gradients' reduction"),
    ],
    timed=[
        Case(B=4, T=64, D=128, F=256),
        Case(B=8, T=128, D=512, F=2048),
        Case(B=4, T=4096, D=2048, F=8192),
    ],
    extremes={
        "saturated": {"x": normal(50.0)},
        "tiny": {"x": normal(1e-3)},
    },
    bytes={
        "forward": lambda size, B, T, D, F: (B * T * (D + F) + 2 * F * D) * size,
        "backward": lambda size, B, T, D, F: (B * T * (2 * D + 3 * F) + 4 * F * D) * size,
    },
    flops={
        "forward": lambda B, T, D, F: 4 * B * T * D * F + 5 * B * T * F,
        "backward": lambda B, T, D, F: 8 * B * T * D * F + 10 * B * T * F,
    },
)


@swiglu.reference
def eager(x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> torch.Tensor:
    """x (B T D), weights (F D) -> h (B T F): two products, silu, multiply."""
    return F.silu(F.linear(x_BTD, w_gate_FD)) * F.linear(x_BTD, w_up_FD)


@swiglu.provider("torch")
def stacked(x_BTD: torch.Tensor, w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> torch.Tensor:
    """One product with the stacked weights: one pass over x, at the price of a copy of W."""
    gate, up = F.linear(x_BTD, torch.cat((w_gate_FD, w_up_FD))).chunk(2, -1)
    return F.silu(gate) * up


@swiglu.independent("torch.nn.functional.glu")
def gated(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """glu(a, b) = a sigmoid(b), so silu(g) is glu of g beside itself."""
    gate = x @ w_gate.mT
    return F.glu(torch.cat((gate, gate), -1)) * (x @ w_up.mT)


# -- Triton -------------------------------------------------------------------------------------


@jit
def _sigmoids(x):
    """sigmoid(x) and sigmoid(-x) = 1 - sigmoid(x), without overflow or cancellation."""
    small = tl.exp(-tl.abs(x))
    low, high = small / (1 + small), 1 / (1 + small)
    return tl.where(x < 0, low, high), tl.where(x < 0, high, low)


@jit
def activate_kernel(
    gate, up, h, n_rows, width, stride_gate, stride_up, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """h = silu(gate) up on a tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    rows, columns = rows.to(tl.int64)[:, None], columns[None, :]
    a = tl.load(gate + rows * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + rows * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid, _ = _sigmoids(a)
    value = (a * sigmoid * b).to(h.dtype.element_ty)
    tl.store(h + rows * width + columns, value, mask=inside)


@jit
def activate_backward_kernel(
    dh,
    gate,
    up,
    dgate,
    dup,
    h,
    n_rows,
    width,
    stride_dh,
    stride_gate,
    stride_up,
    stride_dgate,
    stride_dup,
    stride_h,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dgate = dh up s (1 + gate (1 - s)) with s = sigmoid(gate), dup = dh gate s, and h again
    where it is not None, on a tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    rows, columns = rows.to(tl.int64)[:, None], columns[None, :]
    upstream = tl.load(dh + rows * stride_dh + columns, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + rows * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + rows * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid, rest = _sigmoids(a)
    silu = a * sigmoid
    da = (upstream * b * sigmoid * (1 + a * rest)).to(dgate.dtype.element_ty)
    tl.store(dgate + rows * stride_dgate + columns, da, mask=inside)
    db = (upstream * silu).to(dup.dtype.element_ty)
    tl.store(dup + rows * stride_dup + columns, db, mask=inside)
    if h is not None:
        tl.store(h + rows * stride_h + columns, (silu * b).to(h.dtype.element_ty), mask=inside)


def _tile(F: int, elements: int, num_warps: int) -> Config:
    columns = min(F, elements)
    return Config(ROWS=elements // columns, COLUMNS=columns, num_warps=num_warps)


def _space(name: str) -> Space:
    return Space(
        name,
        default=lambda F, dtype: _tile(F, 1024, 4),
        configs=lambda F, dtype: [
            _tile(F, elements, warps)
            for elements in (512, 1024, 2048, 4096)
            for warps in (1, 2, 4, 8)
            if 128 <= elements // warps <= 1024
        ],
    )


ACTIVATE = _space("swiglu.activate")
ACTIVATE_BACKWARD = _space("swiglu.activate_backward")


def _choose(space: Space, x_NF: torch.Tensor) -> Config:
    width, dtype = next_power_of_2(x_NF.shape[1]), SHORT[x_NF.dtype]
    return space.choose(x_NF.device, F=width, dtype=dtype)


def activate(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """h = silu(gate) up (N F) in gate's dtype, of rows any distance apart (the halves of a packed
    (N 2F) buffer). One launch."""
    gate_NF, up_NF = dense_rows(gate_NF), dense_rows(up_NF)
    N, F = gate_NF.shape
    h_NF = gate_NF.new_empty((N, F))
    if h_NF.numel():
        config = _choose(ACTIVATE, gate_NF)
        activate_kernel[(cdiv(N, config["ROWS"]), cdiv(F, config["COLUMNS"]))](
            gate_NF, up_NF, h_NF, N, F, gate_NF.stride(0), up_NF.stride(0), **config.kwargs()
        )
    return h_NF


def activate_backward(
    dh_NF: torch.Tensor,
    gate_NF: torch.Tensor,
    up_NF: torch.Tensor,
    dgate_NF: torch.Tensor,
    dup_NF: torch.Tensor,
    h_NF: torch.Tensor | None = None,
) -> None:
    """Write the gradients of `activate` into dgate and dup, and h once more into ``h_NF`` where
    one is given. All (N F), rows any distance apart; those written have dense rows. dgate may be
    gate and dup may be up. One launch."""
    dh_NF, gate_NF, up_NF = (dense_rows(t) for t in (dh_NF, gate_NF, up_NF))
    for out in (dgate_NF, dup_NF, h_NF):
        if out is not None and out.shape[-1] > 1 and out.stride(-1) != 1:
            raise ValueError(
                f"activate_backward writes dense rows, an output has strides {out.stride()}: "
                "make the last one 1"
            )
    N, F = gate_NF.shape
    if not gate_NF.numel():
        return
    config = _choose(ACTIVATE_BACKWARD, gate_NF)
    activate_backward_kernel[(cdiv(N, config["ROWS"]), cdiv(F, config["COLUMNS"]))](
        dh_NF,
        gate_NF,
        up_NF,
        dgate_NF,
        dup_NF,
        h_NF,
        N,
        F,
        dh_NF.stride(0),
        gate_NF.stride(0),
        up_NF.stride(0),
        dgate_NF.stride(0),
        dup_NF.stride(0),
        0 if h_NF is None else h_NF.stride(0),
        **config.kwargs(),
    )


def stacked_weights(w_gate_FD: torch.Tensor, w_up_FD: torch.Tensor) -> list[torch.Tensor]:
    """Both as one (2F D) view where they lie side by side in memory, else the two."""
    both = as_one(w_gate_FD, w_up_FD)
    return [w_gate_FD, w_up_FD] if both is None else [both.view(-1, w_gate_FD.shape[1])]


class Hybrid:
    """Products by the vendor's BLAS, one for both weights where these lie side by side; the
    activation and its gradient in one kernel each, from gate and up, which are all that is saved.

    Under autocast the products have its dtype.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, F = compute_dtype(x), w_gate.shape[0]
        x_ND = contiguous(x).flatten(0, 1).to(dtype)
        gate_up = x_ND.new_empty((x_ND.shape[0], 2 * F))
        weights = stacked_weights(w_gate, w_up)
        for weight, out in zip(weights, gate_up.chunk(len(weights), -1), strict=True):
            torch.mm(x_ND, weight.to(dtype).T, out=out)
        h_NF = activate(*gate_up.chunk(2, -1))
        return h_NF.view(*x.shape[:-1], F), gate_up

    @staticmethod
    def backward(
        grads: Sequence[torch.Tensor],
        kept: Mapping[str, torch.Tensor],
        saved: Mapping[str, torch.Tensor],
        needs: set[str],
    ) -> dict[str, torch.Tensor]:
        x, gate_up = kept["x"], saved["gate_up"]
        names, dtype = ("w_gate", "w_up"), gate_up.dtype
        dgate_up = torch.empty_like(gate_up)
        dh_NF = contiguous(grads[0]).flatten(0, 1)
        activate_backward(dh_NF, *gate_up.chunk(2, -1), *dgate_up.chunk(2, -1))
        found = {}
        if "x" in needs:
            weights = stacked_weights(*(kept[name] for name in names))
            parts = dgate_up.chunk(len(weights), -1)
            dx_ND = torch.mm(parts[0], weights[0].to(dtype))
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                dx_ND.addmm_(part, weight.to(dtype))
            found["x"] = dx_ND.to(x.dtype).view(x.shape)
        if not needs.isdisjoint(names):
            x_ND = contiguous(x).flatten(0, 1).to(dtype)
            dboth = product(dgate_up.T, x_ND, kept["w_gate"].dtype)
            found.update(zip(names, dboth.chunk(2), strict=True))
        return found


swiglu.provider(
    "triton",
    keep=("x", "w_gate", "w_up"),
    saved={"gate_up": Tensor("B*T 2*F")},
    requires=("triton",),
)(Hybrid)


@jit
def element_kernel(
    x,
    w_gate,
    w_up,
    h,
    gate,
    up,
    D,
    F,
    stride_out,
    BLOCK: tl.constexpr,
):
    """One element h[n, f], and the gate[n, f] and up[n, f] that it is made of: two dot products
    over D. The other elements of row n read the same x again, those of column f the same weights.
    """
    n, f = (tl.program_id(0) // F).to(tl.int64), (tl.program_id(0) % F).to(tl.int64)
    a, b = tl.full((BLOCK,), 0.0, tl.float32), tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        values = tl.load(x + n * D + d, mask=d < D, other=0.0).to(tl.float32)
        a += values * tl.load(w_gate + f * D + d, mask=d < D, other=0.0).to(tl.float32)
        b += values * tl.load(w_up + f * D + d, mask=d < D, other=0.0).to(tl.float32)
    gate_value, up_value = tl.sum(a, axis=0), tl.sum(b, axis=0)
    sigmoid, _ = _sigmoids(gate_value)
    value = gate_value * sigmoid * up_value
    tl.store(h + n * F + f, value.to(h.dtype.element_ty))
    tl.store(gate + n * stride_out + f, gate_value.to(gate.dtype.element_ty))
    tl.store(up + n * stride_out + f, up_value.to(up.dtype.element_ty))


ELEMENT = Space(
    "swiglu.element",
    default=lambda D: Config(BLOCK=min(D, 256), num_warps=1),
    configs=lambda D: [Config(BLOCK=min(D, 256), num_warps=1)],
)
MOST_NAIVE_WORK = 2**33  # multiplications; some milliseconds on a large GPU


def _too_slow(dims: Mapping[str, Any]) -> str | None:
    work = dims["B"] * dims["T"] * dims["D"] * dims["F"]
    if work <= MOST_NAIVE_WORK:
        return None
    return f"one program for each element: B T D F = {work:,} is more than {MOST_NAIVE_WORK:,}"


@swiglu.provider(
    "naive",
    keep=("x", "w_gate", "w_up"),
    saved={"gate_up": Tensor("B*T 2*F")},
    requires=("triton",),
    supports=_too_slow,
)
class Naive:
    """The kernel one writes first, a program for each element of h: right, and slow, since
    nothing that is read is used twice. Kept as something to find. Backward as in `Hybrid`."""

    @staticmethod
    def forward(
        x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, (F, D) = compute_dtype(x), w_gate.shape
        x_ND, gate_FD, up_FD = (contiguous(t.to(dtype)) for t in (x, w_gate, w_up))
        N = x_ND.numel() // D
        h = x_ND.new_empty((*x.shape[:-1], F))
        gate_up = x_ND.new_empty((N, 2 * F))
        if N:
            config = ELEMENT.choose(x.device, D=next_power_of_2(D))
            element_kernel[(N * F,)](
                x_ND, gate_FD, up_FD, h, *gate_up.chunk(2, -1), D, F, 2 * F, **config.kwargs()
            )
        return h, gate_up

    backward = Hybrid.backward
