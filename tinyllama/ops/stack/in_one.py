"""Launcher of attention with its product in one kernel, and where it is used."""

from __future__ import annotations

import math
from itertools import product

import torch

from tinyllama.harness.kernels import HAS_DESCRIPTORS, dependent, next_power_of_2
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.ops.stack.attention_kernels import attend_kernel
from tinyllama.ops.stack.configs import fitting
from tinyllama.ops.stack.launches import operand

LONGEST, WIDEST = 128, 64  # tokens and head dimension that a program's registers hold


def _separate(D: int, tokens: int) -> Config:
    """Product and attention are launches of their own: on other chips nothing was measured."""
    return Config(BK=0, DESCRIBED=0)


# BK: how much of the inner axis a step of the product takes; 0: `_separate`.
ATTEND = Space(
    "stack.attend",
    default=_separate,
    configs=lambda D, tokens: [
        Config(BK=0, DESCRIBED=0),
        *(
            Config(BK=step, DESCRIBED=by, num_warps=8, num_stages=stages)
            for by, step, stages in product((0, 1), (32, 64, 128), (2, 3, 4))
            if HAS_DESCRIPTORS or not by
        ),
    ],
)


def chosen(qkv_BTE: torch.Tensor, head_dim: int) -> Config | None:
    """The configuration for sequences of this length; None: product and attention are apart."""
    tokens, D = (max(16, next_power_of_2(n)) for n in (qkv_BTE.shape[1], head_dim))
    if qkv_BTE.dtype is torch.float32 or tokens > LONGEST or D > WIDEST or not qkv_BTE.numel():
        return None
    config = ATTEND.choose(qkv_BTE.device, D=D, tokens=tokens)
    return config if config["BK"] else None


def attend(
    config: Config,
    low_ND: torch.Tensor,
    w_ED: torch.Tensor,
    squares: torch.Tensor,
    rstd_N: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    qkv_BTE: torch.Tensor,
    o_BTQ: torch.Tensor,
    lse_BHT: torch.Tensor,
    eps: float,
) -> None:
    """Write what `launches.project` and then `tinyllama.ops.attention.attend` write."""
    (B, T, columns), H, K = qkv_BTE.shape, lse_BHT.shape[1], 2 * cos_TC.shape[1]
    width, G = low_ND.shape[1], (columns // K - H) // 2
    D, BT = (max(16, next_power_of_2(n)) for n in (K, T))
    full_tile, step = T == BT and K == D, config["BK"]
    # No descriptor ends with a sequence or a head.
    config = fitting(config, low_ND, w_ED) if full_tile else config.replace(DESCRIBED=0)
    attend_kernel[(B * H,)](
        operand(config, low_ND, BT, step), operand(config, w_ED, D, step),
        squares, rstd_N, cos_TC, sin_TC, qkv_BTE, o_BTQ, lse_BHT, eps,
        math.log2(math.e) * K**-0.5, T, H, G, width, squares.shape[1],
        PARTS=next_power_of_2(squares.shape[1]), K=K, D=D, BT=BT,
        EVEN=full_tile and width % step == 0, PRECISION=input_precision(low_ND),
        **config.kwargs(), **dependent(low_ND.device),
    )  # fmt: skip
