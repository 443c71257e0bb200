"""Output projection and cross-entropy in one op, so that a provider need not hold all logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.autograd import Grads, Named, Needs, derive
from tinyllama.harness.declare.offsets import zero
from tinyllama.harness.declare.values import Values, normal
from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, tl
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.kernels.precision import SHORT, compute_dtype, narrowed, product
from tinyllama.harness.kernels.streams import Side
from tinyllama.ops import cross_entropy as cross_entropy_file
from tinyllama.ops.cross_entropy import LOSS, TARGETS

linear_cross_entropy = Op(
    "linear_cross_entropy",
    inputs={
        "x": Tensor("N D", grad=True),
        "weight": Tensor("V D", grad=True, values=normal(0.2)),
        "targets": TARGETS,
    },
    outputs={"loss": LOSS},
    cases=[
        Case(N=7, D=32, V=50),
        Case(N=1, D=16, V=64, why="one token"),
        Case(N=65, D=8, V=1000, why="the model's vocabulary, ragged rows"),
        Case(N=9, D=4, V=4100, why="a vocabulary longer than a block, ragged rows"),
        *cross_entropy_file.option_cases(N=9, D=32, V=50),
        *cross_entropy_file.option_cases(N=9, D=4, V=300),  # in chunks
    ],
    params=cross_entropy_file.PARAMS,
    fits=cross_entropy_file.wrong_params,
    timed=[Case(N=256, D=128, V=1000), Case(N=1024, D=512, V=1000), Case(N=8192, D=4096, V=32000)],
    extremes={"sharp": {"x": normal(8.0)}, "tiny": {"x": normal(1e-3)}},
    bytes={
        "forward": lambda size, N, D, V: (N + V) * D * size,
        "backward": lambda size, N, D, V: 2 * (N + V) * D * size,
    },
    flops={
        "forward": lambda N, D, V: 2 * N * D * V + 4 * N * V,
        "backward": lambda N, D, V: 4 * N * D * V + 3 * N * V,
    },
)


@linear_cross_entropy.reference
def eager(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """x (N D), weight (V D), targets (N) -> the loss, as `tinyllama.ops.cross_entropy.eager`'s."""
    logits_NV = F.linear(x_ND, weight_VD)
    return cross_entropy_file.eager(logits_NV, targets_N, ignore_index, reduction)


@linear_cross_entropy.provider("torch")
def stock(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    logits_NV = F.linear(x_ND, weight_VD)
    return cross_entropy_file.stock(logits_NV, targets_N, ignore_index, reduction)


@linear_cross_entropy.independent("torch.einsum and torch.nn.functional.cross_entropy")
def stock_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int | None,
    reduction: str,
) -> torch.Tensor:
    logits = torch.einsum("nd,vd->nv", x, weight)
    return cross_entropy_file.stock_loss(logits, targets, ignore_index, reduction)


# -- in chunks --------------------------------------------------------------------------------

LOGITS_AT_ONCE = 2**26  # bytes of logits up to which they are held
LOGITS_TO_X = 64  # times the size of x from which they are not held, however few they are
CHUNKS = 8  # of tokens. More would round a 16-bit sum over them, the weight's gradient, too often


def in_chunks(N: int, D: int, V: int, dtype: torch.dtype) -> bool:
    """Whether the logits (N V) are never held as a whole.

    Then gradients are computed before the upstream gradient is known, and scaled by it later.
    float16 has no range for that (1 / N times a probability), and holds its logits always.
    """
    large = N * V * dtype.itemsize > LOGITS_AT_ONCE or V >= LOGITS_TO_X * D
    return large and dtype is not torch.float16


def chunk_rows(N: int) -> int:
    """Tokens in a chunk: whole tiles of a product where there are that many. No chunk has one row
    beside others: a library multiplies a single row by another routine, whose float32 sums over V
    were seen to round four times as much.
    """
    rows = max(cdiv(N, CHUNKS), 2)
    tile = 128 if rows > 128 else 1
    rows = cdiv(rows, tile) * tile
    while rows < N and N % rows == 1:
        rows += tile
    return rows


# The streams on which a chunk's two gradients are computed. On two, the product for the weight
# fills the processors that the one for x leaves idle.
STREAMS = Space(
    "linear_cross_entropy.streams",
    default=lambda rows, D, V, dtype: Config(STREAMS=1),
    configs=lambda rows, D, V, dtype: [Config(STREAMS=1), Config(STREAMS=2)],
)


def _side(logits_RV: torch.Tensor, D: int) -> Side | None:
    """The second stream, where `STREAMS` chooses two; else None."""
    rows, V = map(next_power_of_2, logits_RV.shape)
    config = STREAMS.choose(
        logits_RV.device, rows=rows, D=next_power_of_2(D), V=V, dtype=SHORT[logits_RV.dtype]
    )
    return Side(logits_RV.device) if config["STREAMS"] == 2 else None


def chunked_loss(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    chosen: tuple[str, ...] = (),
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> tuple[torch.Tensor, ...]:
    """-> the mean or summed loss (a float32 scalar), then the gradients of the chosen ones of "x"
    and "weight" (in that order) for an upstream gradient of 1. Each token's own loss has an
    upstream gradient of its own, and cannot be had so.

    x (N D) and weight (V D) of one dtype, targets (N). A chunk of logits, replaced by its own
    gradient, is all that is held beside the results. Between chunks the weight's gradient is
    kept in the weight's dtype; the products themselves accumulate in float32. A chunk's two
    gradients are computed on one stream or on two (`STREAMS`), with the same bits.
    """
    N, V = x_ND.shape[0], weight_VD.shape[0]
    x_ND, weight_VD = contiguous(x_ND), contiguous(weight_VD)
    loss_N = torch.empty(N, dtype=torch.float32, device=x_ND.device)
    make = torch.empty_like if N else torch.zeros_like
    dx_ND = make(x_ND) if "x" in chosen else None
    dweight_VD = make(weight_VD) if "weight" in chosen else None
    rows = chunk_rows(N)
    scale: float | torch.Tensor = 1.0
    if reduction == "mean":
        if ignore_index is None:
            scale = 1 / max(N, 1)
        else:
            scale = cross_entropy_file.mean_scale(targets_N, ignore_index)
    logits_RV = torch.empty((rows, V), dtype=x_ND.dtype, device=x_ND.device)
    side = _side(logits_RV, x_ND.shape[1])
    for start in range(0, N, rows):
        chunk = slice(start, min(start + rows, N))
        x_CD, targets_C = x_ND[chunk], targets_N[chunk]
        logits_CV = logits_RV[: x_CD.shape[0]]
        torch.mm(x_CD, weight_VD.T, out=logits_CV)
        if not chosen:
            cross_entropy_file.row_losses(logits_CV, targets_C, loss_N[chunk], ignore_index)
            continue
        cross_entropy_file.losses_and_gradient(
            logits_CV, targets_C, scale, loss_N[chunk], ignore_index=ignore_index
        )
        products = []
        if dx_ND is not None:
            products.append(partial(torch.mm, logits_CV, weight_VD, out=dx_ND[chunk]))
        if dweight_VD is not None and start == 0:
            products.append(partial(torch.mm, logits_CV.T, x_CD, out=dweight_VD))
        elif dweight_VD is not None:
            products.append(partial(dweight_VD.addmm_, logits_CV.T, x_CD))
        if side is not None and len(products) == 2:
            side.both(*products)
        else:
            for multiply in products:
                multiply()
    gradients = [gradient for gradient in (dx_ND, dweight_VD) if gradient is not None]
    if isinstance(scale, torch.Tensor):  # counted before the logits, beside which memory is short
        return loss_N.sum() * scale, *gradients
    return cross_entropy_file.reduced(loss_N, targets_N, ignore_index, reduction), *gradients


SCALED = Space(
    "linear_cross_entropy.scaled",
    default=lambda dtype: Config(BLOCK=2048, BLOCKS=8, num_warps=4),
    configs=lambda dtype: [
        Config(BLOCK=block, BLOCKS=blocks, num_warps=block // 512)
        for block in (1024, 2048, 4096)
        for blocks in (1, 4, 8, 16)
    ],
)


@jit
def _scale_blocks(x, by, out, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in range(0, BLOCKS):
        elements = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = elements < size
        value = tl.load(x + elements, mask=inside, other=0.0).to(tl.float32) * by
        tl.store(out + elements, value.to(out.dtype.element_ty), mask=inside)


@jit
def _scaled(
    x, factor, out, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """out = x * factor, elementwise; in place there is nothing to do for a factor of 1."""
    by = tl.load(factor).to(tl.float32)
    if IN_PLACE:
        if by != 1.0:
            _scale_blocks(x, by, out, size, BLOCK, BLOCKS)
    else:
        _scale_blocks(x, by, out, size, BLOCK, BLOCKS)


def scaled(x: torch.Tensor, factor: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """x (dense, of any shape) * factor (a scalar on the device) in x's dtype; one launch."""
    out = x if in_place else torch.empty_like(x)
    if x.numel():
        config = SCALED.choose(x.device, dtype=SHORT[x.dtype])
        programs = cdiv(x.numel(), config["BLOCK"] * config["BLOCKS"])
        _scaled[(programs,)](x, factor, out, x.numel(), IN_PLACE=in_place, **config.kwargs())
    return out


def _graph_is_kept() -> bool:
    """Whether the backward pass that is running may run again; True where torch does not say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return ask()


def _chunked(name: str, chosen: tuple[str, ...], *, owned: bool) -> Callable[..., Any]:
    """The loss in chunks as an autograd function that computes these gradients.

    owned: what forward saved may be scaled in place and handed out, if the graph is not kept: it
    is this function's alone, and half of the peak. A custom op may not do so.
    """
    shapes = {"x": "N D", "weight": "V D"}

    class Chunked:
        @staticmethod
        def forward(
            x_ND: torch.Tensor,
            weight_VD: torch.Tensor,
            targets_N: torch.Tensor,
            ignore_index: int | None,
            reduction: str,
        ) -> tuple[torch.Tensor, ...]:
            return chunked_loss(x_ND, weight_VD, targets_N, chosen, ignore_index, reduction)

        @staticmethod
        def backward(
            grads: Grads, inputs: Named, saved: Named, needs: Needs, **params: Any
        ) -> Named:
            (dloss,) = grads
            in_place = owned and not _graph_is_kept()
            return {
                name: scaled(saved[f"d{name}"], dloss, in_place=in_place)
                for name in chosen
                if name in needs
            }

    traits: dict[str, Any] = {"saved": {f"d{of}": Tensor(shapes[of]) for of in chosen}}
    if not owned:
        traits["keep"] = chosen  # for the dtypes of the gradients
    derived = derive(linear_cross_entropy, name, Chunked, traits)
    assert derived is not None
    return derived.caller()


_CHUNKED = {
    ("x", "weight"): _chunked("triton_chunks", ("x", "weight"), owned=True),
    ("x",): _chunked("triton_chunks_x", ("x",), owned=True),
    ("weight",): _chunked("triton_chunks_weight", ("weight",), owned=True),
}
_CHUNKED_COMPILED = _chunked("triton_chunks_compiled", ("x", "weight"), owned=False)


class _Projection(torch.autograd.Function):
    """Logits (N V) = x W^T by a copy of W (V D) in the dtype of x (N D). The gradient of W is made
    in W's own dtype, at the same time as that of x where `STREAMS` says so."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight_VD: torch.Tensor, low_VD: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_ND, low_VD)
        ctx.dtype = weight_VD.dtype
        return F.linear(x_ND, low_VD)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogits_NV: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_ND, low_VD = ctx.saved_tensors
        dlogits_NV, low_VD = contiguous(dlogits_NV), contiguous(low_VD)
        x_ND = contiguous(x_ND)
        dx_ND = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        dweight_VD = None
        if ctx.needs_input_grad[1]:
            dweight_VD = torch.empty_like(low_VD, dtype=ctx.dtype)
        products: list[Callable[[], object]] = []
        if dx_ND is not None:
            products.append(partial(torch.mm, dlogits_NV, low_VD, out=dx_ND))
        if dweight_VD is not None:
            products.append(partial(product, dlogits_NV.T, x_ND, ctx.dtype, dweight_VD))
        side = _side(dlogits_NV, x_ND.shape[1]) if len(products) == 2 else None
        if side is not None:
            side.both(*products)
        else:
            for multiply in products:
                multiply()
        return dx_ND, dweight_VD, None


def _logits(x_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """x W^T (N V) in the dtype of products."""
    dtype = compute_dtype(x_ND)
    x_ND = x_ND.to(dtype)
    if torch.compiler.is_compiling():
        return F.linear(x_ND, narrowed(weight_VD, dtype))
    with torch.no_grad():
        low_VD = narrowed(weight_VD, dtype)
    return _Projection.apply(x_ND, weight_VD, low_VD)


def _one_class(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Weights (V D) whose first column is for class 0 alone."""
    weight_VD = 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weight_VD[:, 0] = 0
    weight_VD[0, 0] = 1
    return weight_VD


def _pointing(ends_ND: torch.Tensor) -> torch.Tensor:
    """What `_one_class` makes logits of that are sure of class 0."""
    row_D = torch.zeros_like(ends_ND[0])
    row_D[0] = 200
    return row_D


@linear_cross_entropy.provider(
    "triton",
    requires=("triton",),
    double_backward=False,
    slowdowns={"device_seconds": 0.03},  # processes that run the same code differ by 1.3%
    large=(
        Large(
            "N",
            "D",  # V / 8 is more: the last chunk of logits ends past 2^31 too
            {"D": 64, "V": 1000},
            between={"x": _pointing, "targets": zero},
            values={"weight": Values("one_class", _one_class)},
            settings={"LOGITS_AT_ONCE": 0},
        ),
    ),
)
def chunked_or_not(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """The vendor's products around the fused loss; in chunks where `in_chunks` says so, unless
    each token's own loss is asked for."""
    params: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    dtype = compute_dtype(x_ND)
    N, D = x_ND.shape
    if reduction == "none" or not in_chunks(N, D, weight_VD.shape[0], dtype):
        logits_NV = _logits(x_ND, weight_VD)
        return cross_entropy_file.cross_entropy["triton"](logits_NV, targets_N, **params)
    x_ND, weight_VD = x_ND.to(dtype), narrowed(weight_VD, dtype)
    if torch.compiler.is_compiling():
        return _CHUNKED_COMPILED(x_ND, weight_VD, targets_N, **params)
    inputs = {"x": x_ND, "weight": weight_VD}
    needed = tuple(name for name, tensor in inputs.items() if tensor.requires_grad)
    if not needed or not torch.is_grad_enabled():
        return chunked_loss(x_ND, weight_VD, targets_N, (), **params)[0]
    return _CHUNKED[needed](x_ND, weight_VD, targets_N, **params)
