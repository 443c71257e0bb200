"""Launchers of the kernels of `stack`."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tinyllama.harness.kernels import cdiv, dependent, described, next_power_of_2
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.ops.stack import kernels
from tinyllama.ops.stack.configs import (
    GATE_UP,
    HIDDEN_GRADIENT,
    OUT_GRADIENT,
    QKV,
    WEIGHT_GRADIENTS,
    fitting,
    key_of,
)

AHEAD = 2048  # rows, up to which what an epilogue reads is brought into the cache ahead


def _chosen(
    space: Space, a_NI: torch.Tensor, w: torch.Tensor, columns: int, turned: bool = False
) -> Config:
    """The tiles for a product of a (N inner) and w with so many columns; the default ones where the
    chip's choice is the vendor's BLAS, and a plan asks for the kernel all the same."""
    key = key_of(a_NI, columns, turned)
    config = space.choose(a_NI.device, **key)
    return fitting(config if config["BM"] else space.default(**key), a_NI, w)


def operand(config: Config, matrix: torch.Tensor, *block: int) -> Any:
    """A matrix as kernels of the configuration take it: a descriptor with this block, which rounds
    where products are in tf32, or itself."""
    if not config["DESCRIBED"]:
        return matrix
    return described(matrix, block, to_tf32=input_precision(matrix) == "tf32")


def _operands(config: Config, a: torch.Tensor, w: torch.Tensor, by_out: bool) -> tuple[Any, Any]:
    """a and w of a product; by_out: w's rows are the product's columns."""
    bm, bn, bk = config["BM"], config["BN"], config["BK"]
    return operand(config, a, bm, bk), operand(config, w, *((bn, bk) if by_out else (bk, bn)))


def _grid(config: Config, rows: int, columns: int, half: int = 1) -> tuple[int]:
    return (cdiv(rows, config["BM"]) * cdiv(columns, config["BN"] // half),)


def _options(config: Config, a: torch.Tensor, columns: int, half: int = 1) -> dict[str, Any]:
    rows, inner = a.shape
    even = not (rows % config["BM"] or inner % config["BK"] or columns % (config["BN"] // half))
    options = {"EVEN": even, "PRECISION": input_precision(a), **config.kwargs()}
    return {**options, **dependent(a.device)}


def fold(
    x_ND: torch.Tensor,
    gain_D: torch.Tensor | None,
    low_ND: torch.Tensor,
    *,
    counters: torch.Tensor | None = None,
    delta_ND: torch.Tensor | None = None,
    total_ND: torch.Tensor | None = None,
    rstd_N: torch.Tensor | None = None,
    eps: float = 0.0,
    low_turned: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write low = x gain; -> the sums of x^2 of the rows (N 1), float32. Without a gain, low = x,
    and nothing is summed. counters: dense int32, to be set to 0 by the same launch.

    Given rstd (N), write the norm of x itself instead, low = x rstd gain, and rstd; -> None. Given
    delta and total (N D), first write total = x + delta, which then is what x stands for.
    low_turned (D N): the memory for low^T; None: it is not written."""
    n_rows, width = x_ND.shape
    squares = None
    if rstd_N is None and gain_D is not None:
        squares = x_ND.new_empty((n_rows, 1), dtype=torch.float32)
    padded = next_power_of_2(max(width, 16))
    rows = max(1, min(2048 // padded, 16))
    kernels.fold_kernel[(cdiv(n_rows, rows),)](
        x_ND, gain_D, low_ND, squares, n_rows, width, delta_ND, total_ND, rstd_N, eps,
        counters, 0 if counters is None else counters.numel(),
        ROWS=rows, WIDTH=padded, num_warps=min(16, max(1, rows * padded // 512)),
        low_turned=low_turned, **dependent(x_ND.device),
    )  # fmt: skip
    return squares


def project(
    low_ND: torch.Tensor,
    w_ED: torch.Tensor,
    squares: torch.Tensor,
    rstd_N: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    qkv_NE: torch.Tensor,
    rotated: int,
    eps: float,
    qkv_EN: torch.Tensor | None = None,
) -> None:
    """Write q, k and v (N E) of normalised rows, the first ``rotated`` columns rotated, and rstd
    (N); and their transpose where memory for it is given. low (N D) and squares (N parts) as `fold`
    and `add_product` give them."""
    (n_rows, width), columns = low_ND.shape, w_ED.shape[0]
    config = _chosen(QKV, low_ND, w_ED, columns)
    kernels.qkv_kernel[_grid(config, n_rows, columns)](
        *_operands(config, low_ND, w_ED, True), squares, rstd_N, cos_TC, sin_TC, qkv_NE, eps,
        n_rows, width, columns, rotated, *cos_TC.shape, squares.shape[1],
        PARTS=next_power_of_2(squares.shape[1]), **_options(config, low_ND, columns),
        qkv_turned=qkv_EN,
    )  # fmt: skip


def gate(
    low_ND: torch.Tensor,
    w_UD: torch.Tensor,
    squares: torch.Tensor,
    rstd_N: torch.Tensor,
    gate_up_NU: torch.Tensor,
    h_NF: torch.Tensor,
    eps: float,
    h_FN: torch.Tensor | None = None,
) -> None:
    """Write gate and up (N U = 2 F) of normalised rows, h = silu(gate) up (N F), and rstd (N); and
    h^T where memory for it is given."""
    (n_rows, width), hidden = low_ND.shape, w_UD.shape[0] // 2
    config = _chosen(GATE_UP, low_ND, w_UD, 2 * hidden)
    kernels.gate_up_kernel[_grid(config, n_rows, hidden, 2)](
        operand(config, low_ND, config["BM"], config["BK"]),
        operand(config, w_UD.view(2, hidden, width), 2, config["BN"] // 2, config["BK"]),
        squares, rstd_N, gate_up_NU, h_NF, eps, n_rows, width, hidden, squares.shape[1],
        PARTS=next_power_of_2(squares.shape[1]),
        **_options(config, low_ND, hidden, 2), h_turned=h_FN,
    )  # fmt: skip


def add_product(
    space: Space,
    a_NI: torch.Tensor,
    w_DI: torch.Tensor,
    x_ND: torch.Tensor,
    total_ND: torch.Tensor,
    gain_D: torch.Tensor | None = None,
    low_ND: torch.Tensor | None = None,
    low_DN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write total = x + a W^T (N D) and, with the gain of the norm that follows, low = total gain,
    and low^T where memory for it is given; -> the sums of total^2 of the rows by tiles (N parts),
    float32."""
    (n_rows, inner), width = a_NI.shape, w_DI.shape[0]
    config = _chosen(space, a_NI, w_DI, width)
    parts = cdiv(width, config["BN"])
    squares = a_NI.new_empty((n_rows, parts), dtype=torch.float32)
    kernels.residual_kernel[_grid(config, n_rows, width)](
        *_operands(config, a_NI, w_DI, True), x_ND, gain_D, total_ND, low_ND,
        None if gain_D is None else squares, n_rows, width, inner, parts,
        **_options(config, a_NI, width), FETCH=n_rows <= AHEAD, low_turned=low_DN,
    )  # fmt: skip
    return squares


def hidden_gradient(
    dy_ND: torch.Tensor,
    w_DF: torch.Tensor,
    gate_up_NU: torch.Tensor,
    rstd_N: torch.Tensor,
    dgate_up_NU: torch.Tensor,
    w_FD: torch.Tensor | None = None,
    dgate_up_UN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradient of gate and up, times rstd (N U = 2 F), given that of the product of h;
    -> the sums of its products with gate and up by tiles (N parts), float32. Given the transpose of
    w, that is read; given the memory for the transpose of the result, it is written too."""
    (n_rows, width), hidden = dy_ND.shape, w_DF.shape[1]
    w, by_out = (w_DF, False) if w_FD is None else (w_FD, True)
    config = _chosen(HIDDEN_GRADIENT, dy_ND, w, hidden)
    parts = dy_ND.new_empty((n_rows, cdiv(hidden, config["BN"])), dtype=torch.float32)
    kernels.hidden_gradient_kernel[_grid(config, n_rows, hidden)](
        *_operands(config, dy_ND, w, by_out), gate_up_NU, rstd_N, dgate_up_NU, parts,
        n_rows, width, hidden, parts.shape[1], **_options(config, dy_ND, hidden),
        FETCH=n_rows <= AHEAD, TURNED=by_out, dgate_up_turned=dgate_up_UN,
    )  # fmt: skip
    return parts


def tile_rows(space: Space, dy_NO: torch.Tensor, width: int) -> int:
    """How many rows of partial sums `norm_gradient` writes for the gain's gradient."""
    return cdiv(dy_NO.shape[0], _chosen(space, dy_NO, dy_NO, width)["BM"])


def norm_gradient(
    space: Space,
    dy_NO: torch.Tensor,
    w_OD: torch.Tensor,
    parts: torch.Tensor,
    rstd_N: torch.Tensor,
    x_ND: torch.Tensor,
    gain_D: torch.Tensor,
    dresidual_ND: torch.Tensor,
    dx_ND: torch.Tensor,
    dx_low_ND: torch.Tensor | None,
    dgain_PD: torch.Tensor,
    *,
    scaled: bool = True,
    w_DO: torch.Tensor | None = None,
    dx_DN: torch.Tensor | None = None,
) -> None:
    """Write the gradient of x, which a norm and a product with W (O D) followed, plus dresidual;
    dy (N O) is times rstd (not so where ``scaled`` is False), parts (N parts) its products with the
    result of the product. dgain (P D) float32: partial sums for the gain, P as of `tile_rows`.
    Given the transpose of w, that is read; given the memory for that of dx, it is written."""
    (n_rows, inner), width = dy_NO.shape, w_OD.shape[1]
    w, by_out = (w_OD, False) if w_DO is None else (w_DO, True)
    config = _chosen(space, dy_NO, w, width)
    kernels.norm_gradient_kernel[_grid(config, n_rows, width)](
        *_operands(config, dy_NO, w, by_out), parts, rstd_N, x_ND, gain_D, dresidual_ND,
        dx_ND, dx_low_ND, dgain_PD, n_rows, width, inner, parts.shape[1],
        PARTS=next_power_of_2(parts.shape[1]), **_options(config, dy_NO, width),
        FETCH=n_rows <= AHEAD, SCALED=scaled, TURNED=by_out, dx_turned=dx_DN,
    )  # fmt: skip


def input_product(
    dy_NO: torch.Tensor,
    w_OD: torch.Tensor,
    w_DO: torch.Tensor | None = None,
    dx_DN: torch.Tensor | None = None,
) -> torch.Tensor:
    """dx (N D) = dy W, in dy's dtype. Transposes as of `norm_gradient`."""
    (n_rows, inner), width = dy_NO.shape, w_OD.shape[1]
    w, by_out = (w_OD, False) if w_DO is None else (w_DO, True)
    config = _chosen(OUT_GRADIENT, dy_NO, w, width)
    dx_ND = dy_NO.new_empty((n_rows, width))
    kernels.product_kernel[_grid(config, n_rows, width)](
        *_operands(config, dy_NO, w, by_out), dx_ND, n_rows, width, inner,
        **_options(config, dy_NO, width), TURNED=by_out, dx_turned=dx_DN,
    )  # fmt: skip
    return dx_ND


def weight_gradients(
    threes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], *, turned: bool = False
) -> None:
    """Write dW (out in) = dy^T x for each of the four products of a block, given (dy, x, dW): dy
    (N out) and x (N in) dense, in the order qkv, out, gate and up, down. turned: given are the
    transposes of dy and x, dense. One launch."""
    inner, outer = (1, 0) if turned else (0, 1)  # the axes of dy and x
    (dqkv, low, _), (_, o, _), _, (_, h, _) = threes
    n_rows, columns = dqkv.shape[inner], dqkv.shape[outer]
    width, heads, hidden = (x.shape[outer] for x in (low, o, h))
    config = _chosen(WEIGHT_GRADIENTS, low, low, hidden, turned)
    config = fitting(config, *(tensor for dy, x, _ in threes for tensor in (dy, x)))
    bm, bn, bk = config["BM"], config["BN"], config["BK"]
    tiles = [cdiv(dw.shape[0], bm) * cdiv(dw.shape[1], bn) for _, _, dw in threes]
    *ends, programs = itertools.accumulate(tiles)
    sides = (columns, width, 2 * hidden)
    even = not (
        n_rows % bk
        or any(side % bm for side in sides)
        or any(side % bn for side in (width, heads, hidden))
    )
    options = {name: value for name, value in config.kwargs().items() if name != "GROUP"}
    of_dy, of_x = ((bm, bk), (bn, bk)) if turned else ((bk, bm), (bk, bn))
    operands = [
        argument
        for dy, x, dw in threes
        for argument in (operand(config, dy, *of_dy), operand(config, x, *of_x), dw)
    ]
    kernels.weight_gradients_kernel[(programs,)](
        *operands,
        n_rows, width, columns, heads, hidden, *ends,
        EVEN=even, PRECISION=input_precision(low), **options, **dependent(low.device),
        TURNED=turned,
    )  # fmt: skip
