"""SwiGLU's activation: h = silu(gate) * up, silu(a) = a sigmoid(a)  (Shazeer, arXiv 2002.05202).

An op of its own, so that it is checked and timed apart from the products that make gate and up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import begin, cdiv, dependent, jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_rows, dense_rows, even_rows
from tinyllama.harness.kernels.precision import SHORT

silu_mul = Op(
    "silu_mul",
    inputs={"gate": Tensor("N F", grad=True), "up": Tensor("N F", grad=True)},
    outputs={"h": "N F"},
    leading=("N",),
    cases=[
        Case(N=6, F=24),
        Case(N=1, F=1, why="one element"),
        Case(N=3, F=1025, why="a row that ends beside a block"),
        Case(N=130, F=33, why="several rows of a block, ragged everywhere"),
        Case(N=(2, 3), F=20, why="more leading axes"),
        Case(N=(), F=40, why="a vector"),
    ],
    timed=[Case(N=256, F=256), Case(N=1024, F=2048), Case(N=16384, F=11008)],
    extremes={
        "saturated": {"gate": normal(50.0)},
        "tiny": {"gate": normal(1e-3)},
        "negative": {"gate": normal(1.0, mean=-20.0)},
    },
    bytes={
        "forward": lambda size, N, F: 3 * N * F * size,
        "backward": lambda size, N, F: 5 * N * F * size,
    },
    flops={"forward": lambda N, F: 5 * N * F, "backward": lambda N, F: 10 * N * F},
    slowdowns={"device_seconds": 0.03},  # processes that run the same code differ by 1.4%
)


@silu_mul.reference
def eager(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """gate and up (... F) -> h (... F) in gate's dtype; computed in float32 or wider."""
    wide_NF = gate_NF.to(torch.promote_types(gate_NF.dtype, torch.float32))
    return (wide_NF * torch.sigmoid(wide_NF) * up_NF).to(gate_NF.dtype)


@silu_mul.provider("torch")
def stock(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """Two stock kernels; silu(gate) is written and read again between them."""
    return F.silu(gate_NF) * up_NF


@silu_mul.independent("torch.nn.functional.glu")
def by_glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """glu(a, b) = a sigmoid(b), so silu(g) is glu of g beside itself."""
    return F.glu(torch.cat((gate, gate), -1)) * up


# -- Triton -------------------------------------------------------------------------------------


@jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x) = 1 - sigmoid(x), without overflow or cancellation."""
    small = tl.exp(-tl.abs(x))
    low, high = small / (1 + small), 1 / (1 + small)
    return tl.where(x < 0, low, high), tl.where(x < 0, high, low)


@jit
def activate_kernel(
    gate, up, h, n_rows, width, stride_gate, stride_up,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """h = silu(gate) up on a tile."""
    begin(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    rows, columns = rows.to(tl.int64)[:, None], columns[None, :]
    a = tl.load(gate + rows * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + rows * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid, _ = sigmoids(a)
    value = (a * sigmoid * b).to(h.dtype.element_ty)
    tl.store(h + rows * width + columns, value, mask=inside)


@jit
def activate_backward_kernel(
    dh, gate, up, dgate, dup, h, n_rows, width,
    stride_dh, stride_gate, stride_up, stride_dgate, stride_dup, stride_h,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """dgate = dh up s (1 + gate (1 - s)) with s = sigmoid(gate), dup = dh gate s, and h again
    where it is not None, on a tile."""
    begin(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    rows, columns = rows.to(tl.int64)[:, None], columns[None, :]
    upstream = tl.load(dh + rows * stride_dh + columns, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + rows * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + rows * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid, rest = sigmoids(a)
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


ACTIVATE = _space("silu_mul.activate")
ACTIVATE_BACKWARD = _space("silu_mul.activate_backward")


def _choose(space: Space, x_NF: torch.Tensor) -> Config:
    width, dtype = next_power_of_2(x_NF.shape[1]), SHORT[x_NF.dtype]
    return space.choose(x_NF.device, F=width, dtype=dtype)


def activate(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """h = silu(gate) up (N F) in gate's dtype, of rows any distance apart (the halves of a packed
    (N 2F) buffer). into: the memory for h, contiguous. One launch."""
    gate_NF, up_NF = dense_rows(gate_NF), dense_rows(up_NF)
    N, F = gate_NF.shape
    h_NF = gate_NF.new_empty((N, F)) if into is None else into
    if h_NF.numel():
        config = _choose(ACTIVATE, gate_NF)
        activate_kernel[(cdiv(N, config["ROWS"]), cdiv(F, config["COLUMNS"]))](
            gate_NF, up_NF, h_NF, N, F, gate_NF.stride(0), up_NF.stride(0),
            **config.kwargs(), **dependent(gate_NF.device),
        )  # fmt: skip
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
        dh_NF, gate_NF, up_NF, dgate_NF, dup_NF, h_NF, N, F,
        dh_NF.stride(0), gate_NF.stride(0), up_NF.stride(0), dgate_NF.stride(0), dup_NF.stride(0),
        0 if h_NF is None else h_NF.stride(0), **config.kwargs(), **dependent(gate_NF.device),
    )  # fmt: skip


@silu_mul.provider(
    "triton",
    keep=("gate", "up"),
    reads={"gate": even_rows, "up": even_rows},
    requires=("triton",),
    replays=True,
    large=(Large("N", "F", {"F": 1000}),),
    slowdowns={"host_seconds": 0.25},  # processes that run the same code differ by 10%
)
class Triton:
    """One launch each way; backward computes silu(gate) again, so that gate and up are all that
    is kept, and nothing is written beside the results."""

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        h = gate.new_empty(gate.shape)
        activate(as_rows(gate), as_rows(up), as_rows(h))
        return h

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs) -> Named:
        gate, up = inputs["gate"], inputs["up"]
        gradients = {"gate": gate.new_empty(gate.shape), "up": up.new_empty(up.shape)}
        dh = even_rows(grads[0])
        activate_backward(*map(as_rows, (dh, gate, up, gradients["gate"], gradients["up"])))
        return gradients
