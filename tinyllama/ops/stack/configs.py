"""What a chip chooses for `stack`: whether it is used, which of a block's products are kernels of
ours, and the tiles of these."""

from __future__ import annotations

from typing import Any

import torch

from tinyllama.harness.kernels import HAS_DESCRIPTORS, next_power_of_2
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.harness.kernels.tf32 import descriptors_round
from tinyllama.ops.attention import FARTHEST_ROW

MOST_ROWS = 8192  # more rows share one choice
FEW = 2048  # rows, up to which the stack is the default plan
MOST_KEPT = 8192  # rows, up to which h is kept where the backward pass could compute it again


def _plan(rows: int, width: int, kind: str) -> Config:
    return Config(FUSED=int(rows <= FEW and not kind.startswith("tf32")))


# Whether a model's blocks are one stack, or those of the op `block`, one by one: the vendor's
# products and a kernel for everything else. On chips without an entry nothing was measured; on
# MI325X, measure the second first for many rows and float32.
PLAN = Space(
    "stack.plan",
    default=_plan,
    configs=lambda **key: [Config(FUSED=fused) for fused in (0, 1)],
)


def pays(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the plan for rows of x (... D) and products in ``dtype`` is the stack."""
    return bool(PLAN.choose(x.device, **_plan_key(x, dtype))["FUSED"])


# Whether a block is updated beside the backward pass of the blocks below it. The vendor's programs
# fill a multiprocessor: an update beside them takes their time.
BESIDE = Space(
    "stack.beside",
    default=lambda rows, width, kind: Config(ON=1),
    configs=lambda rows, width, kind: [Config(ON=on) for on in (0, 1)],
)


def pays_beside(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """The choice of `BESIDE` for rows of x (... D) and products in ``dtype``."""
    return bool(BESIDE.choose(x.device, **_plan_key(x, dtype))["ON"])


def _plan_key(x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    width = x.shape[-1]
    rows = min(MOST_ROWS, next_power_of_2(x.numel() // width)) if width else 0
    kind = kind_of(x.new_empty(0, dtype=dtype))
    return {"rows": rows, "width": next_power_of_2(width), "kind": kind}


# Whether gradients are computed from transposes, which the kernels that make an operand store
# beside it (see `tinyllama.ops.stack.kernels`): a question for 32 bits alone. 2: attention reads
# transposes as well.
TURNED = Space(
    "stack.turned",
    default=lambda rows, width, kind: Config(TURN=0),
    configs=lambda rows, width, kind: [
        Config(TURN=turn) for turn in ((0,) if kind == "16bit" else (0, 1, 2))
    ],
)


def turns(x: torch.Tensor, dtype: torch.dtype) -> int:
    """The choice of `TURNED` for rows of x (... D) and products in ``dtype``; 0 if there are so
    many rows that offsets in a tile of transposes exceed 32 bits: one of `fold` has D columns."""
    width = max(1, x.shape[-1])
    if dtype is not torch.float32 or x.numel() // width > min(FARTHEST_ROW, 2**31 // width):
        return 0
    return TURNED.choose(x.device, **_plan_key(x, dtype))["TURN"]


def kind_of(a: torch.Tensor) -> str:
    """The kind of product that operands like ``a`` are multiplied in."""
    precision = input_precision(a)
    return "16bit" if a.dtype is not torch.float32 else {"ieee": "fp32"}.get(precision, precision)


def _default(rows: int, inner: int, columns: int, kind: str) -> Config:
    """Chosen so that no chip's compiler spills."""
    wide = 64 if kind == "16bit" else 32
    return Config(BM=64, BN=64, BK=wide, GROUP=8, DESCRIBED=0, num_warps=4, num_stages=2)


# Tiles (BM BN BK), warps and stages that were among the fastest of a search on sm_90, and smaller
# ones for chips with less shared memory.
TILES = (
    (64, 64, 64, 4, 2),
    (64, 64, 64, 4, 4),
    (64, 64, 64, 4, 6),
    (64, 64, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (64, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 128, 64, 4, 5),
    (128, 64, 64, 4, 2),
    (128, 64, 64, 4, 4),
    (128, 64, 128, 4, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 2),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
)
# The same for products in 16 bits whose operands are tensor descriptors.
DESCRIBED = (
    (64, 64, 64, 4, 8),
    (64, 64, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3),
)
DEEP = ((64, 64, 256, 4, 3), (64, 128, 64, 4, 5), (128, 128, 128, 8, 3))  # in tf32, on an H100


def _configs(rows: int, inner: int, columns: int, kind: str) -> list[Config]:
    """In 32 bits, steps are half as deep, so that they take as much shared memory. Where several
    products make up one (tf32x3), tiles are small. The last configuration stands for the vendor's
    BLAS (see `is_fused`)."""
    narrow = 1 if kind == "16bit" else 2
    vendor_product = Config(BM=0, BN=0, BK=0, GROUP=8, DESCRIBED=0)
    described: tuple[tuple[int, ...], ...] = ()
    if kind in ("16bit", "tf32") and HAS_DESCRIPTORS:
        described = DESCRIBED + (DEEP if kind == "tf32" else ())
    tiles = [
        Config(
            BM=bm, BN=bn, BK=bk // narrow, GROUP=8, DESCRIBED=by,
            num_warps=warps, num_stages=stages,
        )
        for by, tiles in enumerate((TILES, described))
        for bm, bn, bk, warps, stages in tiles
        if kind != "tf32x3" or (bm, bn) == (64, 64)
    ]  # fmt: skip
    return [*tiles, vendor_product]


def _space(name: str) -> Space:
    return Space(f"stack.{name}", default=_default, configs=_configs)


QKV, GATE_UP, OUT, DOWN = map(_space, ("qkv", "gate_up", "out", "down"))
HIDDEN_GRADIENT, OUT_GRADIENT = map(_space, ("hidden_gradient", "out_gradient"))
MLP_GRADIENT, ATTENTION_GRADIENT = map(_space, ("mlp_gradient", "attention_gradient"))
WEIGHT_GRADIENTS = _space("weight_gradients")
# The products of a block by name, in the order of a step: what a plan chooses for each.
PRODUCTS = {
    space.name.removeprefix("stack."): space
    for space in (
        *(QKV, OUT, GATE_UP, DOWN, HIDDEN_GRADIENT, MLP_GRADIENT, OUT_GRADIENT),
        *(ATTENTION_GRADIENT, WEIGHT_GRADIENTS),
    )
}


def key_of(a_NI: torch.Tensor, columns: int, turned: bool = False) -> dict[str, Any]:
    """turned: a is given as its transpose."""
    rows, inner = reversed(a_NI.shape) if turned else a_NI.shape
    sizes = {"rows": min(MOST_ROWS, next_power_of_2(rows)), "inner": next_power_of_2(inner)}
    return {**sizes, "columns": next_power_of_2(columns), "kind": kind_of(a_NI)}


def is_fused(space: Space, a_NI: torch.Tensor, columns: int) -> bool:
    """Whether the chip's choice for a product of a (N inner), with so many columns, is a kernel of
    ours, which has its epilogue; else it is the vendor's BLAS, and a kernel behind it."""
    return space.choose(a_NI.device, **key_of(a_NI, columns))["BM"] > 0


def fitting(config: Config, *matrices: torch.Tensor) -> Config:
    """The configuration, without descriptors if a matrix cannot have one: because it is empty,
    because a row does not begin at a multiple of 16 bytes, or because descriptors do not round."""
    if not config["DESCRIBED"]:
        return config
    there = HAS_DESCRIPTORS
    if any(input_precision(m) == "tf32" for m in matrices):
        there = descriptors_round()
    if there and all(
        m.numel() and not (m.data_ptr() | m.stride(-2) * m.element_size()) % 16 for m in matrices
    ):
        return config
    return config.replace(DESCRIBED=0)
