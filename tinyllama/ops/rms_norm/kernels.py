"""RMSNorm in Triton, forward and backward, with a residual or without; launchers for `rms_norm`,
`add_rms_norm` and `block`.

Rows are read and written once, and held in registers meanwhile. The weight's gradient is summed in
two steps without atomics: each program over its own rows, then one launch over the programs.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, processors_of, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import contiguous, dense_rows
from tinyllama.harness.kernels.precision import SHORT

WIDEST = 16384  # a row is held in registers whole


@jit
def load_tile(x, rows, columns, stride, n_rows, width):
    """x[rows, columns] in its own dtype, zeros outside; rows are ``stride`` elements apart."""
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    places = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(places, mask=inside, other=0.0)


@jit
def load_row(x, columns, width):
    """x[columns] as a tile of one row, in float32, zeros outside."""
    return tl.load(x + columns[None, :], mask=(columns < width)[None, :], other=0.0).to(tl.float32)


@jit
def store_tile(y, value, rows, columns, stride, n_rows, width):
    """Write y[rows, columns], rounded to y's dtype."""
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    places = y + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(places, value.to(y.dtype.element_ty), mask=inside)


@jit
def forward_kernel(
    x, residual, weight, y, total, rstd, eps, n_rows, width,
    stride_x, stride_residual,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y = norm(x) of ROWS rows; with a residual total = x + residual and y = norm(total)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    gain = load_row(weight, columns, width)
    wide = load_tile(x, rows, columns, stride_x, n_rows, width).to(tl.float32)
    if residual is not None:
        wide += load_tile(residual, rows, columns, stride_residual, n_rows, width).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        store_tile(total, rounded, rows, columns, width, n_rows, width)
        wide = rounded.to(tl.float32)  # the norm is that of the sum as it is stored
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    store_tile(y, wide * scale[:, None] * gain, rows, columns, width, n_rows, width)
    tl.store(rstd + rows, scale, mask=rows < n_rows)


@jit
def backward_kernel(
    dy, x, weight, rstd, dresidual, dx, dx_low, partials, n_rows, width,
    stride_dy, stride_x, stride_dresidual, stride_partials,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """dx = dresidual + rstd (w dy - n mean(n w dy)) with n = x rstd, and this program's share of
    dweight = sum of dy n over rows. Programs stride over tiles of ROWS rows; with AHEAD they
    prefetch the next tile. An output that is None is not computed."""
    columns = tl.arange(0, WIDTH)
    gain = load_row(weight, columns, width)
    start = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    share = tl.zeros((ROWS, WIDTH), tl.float32)
    if AHEAD:
        rows = start + tl.arange(0, ROWS)
        next_dy = load_tile(dy, rows, columns, stride_dy, n_rows, width)
        next_x = load_tile(x, rows, columns, stride_x, n_rows, width)
        next_scale = tl.load(rstd + rows, mask=rows < n_rows, other=0.0)
        if dresidual is not None:
            next_added = load_tile(dresidual, rows, columns, stride_dresidual, n_rows, width)
    for first in range(start, n_rows, step):
        rows = first + tl.arange(0, ROWS)
        if AHEAD:
            upstream, wide, scale = next_dy.to(tl.float32), next_x.to(tl.float32), next_scale
            if dresidual is not None:
                added = next_added.to(tl.float32)
            later = rows + step
            next_dy = load_tile(dy, later, columns, stride_dy, n_rows, width)
            next_x = load_tile(x, later, columns, stride_x, n_rows, width)
            next_scale = tl.load(rstd + later, mask=later < n_rows, other=0.0)
            if dresidual is not None:
                next_added = load_tile(dresidual, later, columns, stride_dresidual, n_rows, width)
        else:
            upstream = load_tile(dy, rows, columns, stride_dy, n_rows, width).to(tl.float32)
            wide = load_tile(x, rows, columns, stride_x, n_rows, width).to(tl.float32)
            scale = tl.load(rstd + rows, mask=rows < n_rows, other=0.0)
            gain = load_row(weight, columns, width)
        normed = wide * scale[:, None]
        if partials is not None:
            share += upstream * normed
        if dx is not None:
            scaled = upstream * gain
            mean = tl.sum(scaled * normed, axis=1) / width
            gradient = (scaled - normed * mean[:, None]) * scale[:, None]
            if dresidual is not None:
                if not AHEAD:  # now, when x and dy are no longer held
                    added = load_tile(dresidual, rows, columns, stride_dresidual, n_rows, width)
                    added = added.to(tl.float32)
                gradient += added
            store_tile(dx, gradient, rows, columns, width, n_rows, width)
            if dx_low is not None:
                store_tile(dx_low, gradient, rows, columns, width, n_rows, width)
    if partials is not None:
        place = partials + tl.program_id(0).to(tl.int64) * stride_partials + columns
        tl.store(place, tl.sum(share, axis=0), mask=columns < width)


@jit
def sum_kernel(partials, out, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[s, columns] = the sum over rows of partials[s, row, columns], for one s."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    layer = tl.program_id(1).to(tl.int64)
    share = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        share += load_tile(partials + layer * n_rows * width, rows, columns, width, n_rows, width)
    total = tl.sum(share, axis=0).to(out.dtype.element_ty)
    tl.store(out + layer * width + columns, total, mask=columns < width)


def _tile(D: int, elements: int, most_rows: int, share: int = 512) -> dict[str, int]:
    """Whole rows of about ``elements`` elements in all, with ``share`` elements for each warp."""
    rows = min(max(elements // D, 1), most_rows)
    return {"ROWS": rows, "num_warps": min(max(rows * D // share, 1), 16)}


def _most(dtype: str) -> int:
    """How many elements of a tile fit in a warp's registers."""
    return 512 if dtype == "fp32" else 1024


def _tiles(D: int, share: int, elements: int = WIDEST) -> list[dict[str, int]]:
    """Tiles of at most ``elements`` elements, of which a warp gets at most ``share``."""
    return [
        {"ROWS": rows, "num_warps": warps}
        for rows in (1, 2, 4, 8)
        for warps in (1, 2, 4, 8, 16)
        if 128 <= rows * D / warps <= share and rows * D <= elements
    ]


def _forward_space(name: str) -> Space:
    return Space(
        name,
        default=lambda D, dtype: Config(**_tile(D, 2048, 64)),
        configs=lambda D, dtype: [Config(**tile) for tile in _tiles(D, _most(dtype))],
    )


FORWARD = _forward_space("rms_norm.forward")
ADD_FORWARD = _forward_space("add_rms_norm.forward")

BACKWARD = Space(
    "rms_norm.backward",
    default=lambda D, dtype, added: Config(
        AHEAD=int(512 <= D <= 4096), **_tile(D, 4096, 8, 512 if D >= 512 else 128)
    ),
    configs=lambda D, dtype, added: [
        *(Config(AHEAD=0, **tile) for tile in _tiles(D, 256, 4096)),
        *(Config(AHEAD=1, **tile) for tile in _tiles(D, _most(dtype), 4096)),
    ],
)

SUM = Space(
    "rms_norm.sum",
    default=lambda D: Config(ROWS=64, COLUMNS=32, num_warps=4),
    configs=lambda D: [
        Config(ROWS=rows, COLUMNS=columns, num_warps=warps)
        for rows in (32, 64, 128)
        for columns in (16, 32, 64)
        for warps in (2, 4, 8)
    ],
)


def width_of(x_ND: torch.Tensor) -> int:
    """The power of two that a row of x fills. ValueError for a row that is too wide."""
    width = x_ND.shape[-1]
    if width > WIDEST:
        raise ValueError(f"{too_wide({'D': width})}; use the provider 'torch' for it")
    return max(next_power_of_2(width), 16)


def too_wide(dims: Mapping[str, Any]) -> str | None:
    """Why rows of this width are not covered; None when they are."""
    if dims["D"] <= WIDEST:
        return None
    return f"D = {dims['D']} is more than {WIDEST}, the widest row that fits in registers"


def launch_forward(
    x_ND: torch.Tensor,
    residual_ND: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """y (N D) in ``out_dtype``, rstd (N) float32, and between them, where there is a residual, the
    sum (N D) in the wider of x's and residual's dtypes."""
    width = width_of(x_ND)
    x_ND, weight_D = dense_rows(x_ND), dense_rows(weight_D)
    n_rows, D = x_ND.shape
    y_ND = x_ND.new_empty((n_rows, D), dtype=out_dtype)
    rstd_N = x_ND.new_empty(n_rows, dtype=torch.float32)
    total_ND = None
    if residual_ND is not None:
        residual_ND = dense_rows(residual_ND)
        wide = torch.promote_types(x_ND.dtype, residual_ND.dtype)
        total_ND = residual_ND.new_empty((n_rows, D), dtype=wide)
    if y_ND.numel():
        space = FORWARD if residual_ND is None else ADD_FORWARD
        config = space.choose(x_ND.device, D=width, dtype=SHORT[x_ND.dtype])
        forward_kernel[(cdiv(n_rows, config["ROWS"]),)](
            x_ND, residual_ND, weight_D, y_ND, total_ND, rstd_N, eps, n_rows, D,
            x_ND.stride(0), 0 if residual_ND is None else residual_ND.stride(0),
            WIDTH=width, **config.kwargs(),
        )  # fmt: skip
    return y_ND, total_ND, rstd_N


def norm_forward(
    x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N D), weight (D), of any float dtypes -> y (N D) in ``out_dtype``, rstd (N) float32.

    One launch.
    """
    y_ND, _, rstd_N = launch_forward(x_ND, None, weight_D, eps, out_dtype)
    return y_ND, rstd_N


def partial_rows(n_rows: int, device: torch.device) -> int:
    """P, the programs of a backward pass over so many rows: each gives one row of partial sums
    of the weight's gradient. At most two for a processor, at least 8 rows for a program."""
    return max(1, min(cdiv(n_rows, 8), 2 * processors_of(device)))


def new_partials(x_ND: torch.Tensor) -> torch.Tensor:
    """Memory for the partial sums (P D) of a backward pass over x."""
    shape = (partial_rows(x_ND.shape[0], x_ND.device), x_ND.shape[1])
    return x_ND.new_empty(shape, dtype=torch.float32)


def norm_backward(
    dy_ND: torch.Tensor,
    x_ND: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_N: torch.Tensor,
    dresidual_ND: torch.Tensor | None = None,
    low: torch.dtype | None = None,
    weight_partials: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The gradients of y = norm(x): dx (N D) in x's dtype, the same in dtype ``low`` (None where
    that is None), and partial sums (P D) float32 of the weight's gradient (see `sum_rows`).

    dresidual (N D): what else flows into x; dx is the sum. weight_partials: where to write the
    partial sums, P as of `partial_rows`. All inputs in any float dtypes. One launch.
    """
    if weight_partials is None:
        weight_partials = new_partials(x_ND)
    dx_ND = x_ND.new_empty(x_ND.shape)
    low_ND = None if low is None else x_ND.new_empty(x_ND.shape, dtype=low)
    launch_backward(dy_ND, x_ND, weight_D, rstd_N, dresidual_ND, dx_ND, low_ND, weight_partials)
    return dx_ND, low_ND, weight_partials


def launch_backward(
    dy_ND: torch.Tensor,
    x_ND: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_N: torch.Tensor,
    dresidual_ND: torch.Tensor | None,
    dx_ND: torch.Tensor | None,
    low_ND: torch.Tensor | None,
    partials_PD: torch.Tensor | None,
) -> None:
    """`norm_backward` into the given tensors; an output that is None is not computed."""
    width = width_of(x_ND)
    n_rows, D = x_ND.shape
    programs = partial_rows(n_rows, x_ND.device)
    if partials_PD is not None and partials_PD.shape != (programs, D):
        raise ValueError(
            f"the partial sums have shape {tuple(partials_PD.shape)}, needed is "
            f"{(programs, D)}: partial_rows gives the first"
        )
    if not x_ND.numel():
        if partials_PD is not None:
            partials_PD.zero_()
        return
    dy_ND, x_ND, weight_D = dense_rows(dy_ND), dense_rows(x_ND), dense_rows(weight_D)
    added = dresidual_ND is not None
    if dresidual_ND is not None:
        dresidual_ND = dense_rows(dresidual_ND)
    config = BACKWARD.choose(x_ND.device, D=width, dtype=SHORT[x_ND.dtype], added=added)
    backward_kernel[(programs,)](
        dy_ND, x_ND, weight_D, rstd_N, dresidual_ND, dx_ND, low_ND, partials_PD, n_rows, D,
        dy_ND.stride(0), x_ND.stride(0), 0 if dresidual_ND is None else dresidual_ND.stride(0),
        D if partials_PD is None else partials_PD.stride(0), WIDTH=width, **config.kwargs(),
    )  # fmt: skip


def sum_rows(partials_SPD: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(S P D) float32, dense, or (P D) -> sums over P, (S D) or (D), rounded once to ``dtype``. One
    launch, the same bits every time."""
    *layers, n_rows, D = partials_SPD.shape
    out_SD = partials_SPD.new_empty((*layers, D), dtype=dtype)
    if out_SD.numel():
        partials_SPD = contiguous(partials_SPD)
        config = SUM.choose(partials_SPD.device, D=next_power_of_2(D))
        grid = (cdiv(D, config["COLUMNS"]), *layers)
        sum_kernel[grid](partials_SPD, out_SD, n_rows, D, **config.kwargs())
    return out_SD
