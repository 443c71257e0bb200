"""When attention takes the kernels with specialised warps, and how it launches them.

They are for chips whose `lacking` says None, 16-bit inputs in heads of 64 or 128, and T a multiple
of 128; whether they are used there is a choice in their spaces (ON), by the head dimension and the
tokens of a sequence. Everything else is for the portable kernels.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tinyllama.harness.kernels import chip_of, processors_of
from tinyllama.harness.kernels.configs import Config, Space

TILE = 128  # rows of a program's tile
HEAD_DIMS = (64, 128)
LENGTHS = (512, 1024, 2048, 4096)  # keys of the spaces: the longest that is at most T


def specialised(
    space: Space, tensors: Sequence[torch.Tensor], tokens: int, tiles: int
) -> Config | None:
    """The configuration with which a kernel with specialised warps is launched; None: the portable
    one is. tensors: (B T heads K), those that it reads; tiles: of 128 rows, to be done.

    Raises ValueError where such a kernel is chosen and cannot run.
    """
    first = tensors[0]
    if not _covers(tensors, tokens) or tiles < processors_of(first.device):
        return None
    from tinyllama.harness.kernels.gluon import lacking  # imports Gluon: for those who need it

    reason = lacking(chip_of(first.device))
    length = max(n for n in LENGTHS if n <= tokens)
    config = space.choose(first.device, D=first.shape[-1], tokens=length, gluon=reason is None)
    if not config["ON"]:
        return None
    if reason is not None:
        raise ValueError(f"{space.name} has ON=1, which cannot run: {reason}; choose ON=0")
    return config


def _covers(tensors: Sequence[torch.Tensor], tokens: int) -> bool:
    """Whether these can be read: whole tiles, heads beside each other, rows at one distance and at
    multiples of 16 bytes."""
    q = tensors[0]
    B, K = q.shape[0], q.shape[-1]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and K in HEAD_DIMS
        and tokens >= LENGTHS[0]
        and tokens % TILE == 0
        and B * tokens * q.shape[2] < 2**31
        and all(
            x.dtype is q.dtype
            and x.stride(3) == 1
            and x.stride(2) == K
            and (B == 1 or x.stride(0) == tokens * x.stride(1))
            and x.stride(1) % 8 == 0
            and x.data_ptr() % 16 == 0
            for x in tensors
        )
    )


def _rows(x_BTHK: torch.Tensor, rows: int) -> object:
    """A descriptor of x as (B T, H K), in blocks of so many rows of one head."""
    from tinyllama.harness.kernels.gluon import described

    B, T, H, K = x_BTHK.shape
    return described(x_BTHK.as_strided((B * T, H * K), (x_BTHK.stride(1), 1)), (rows, K))


def _along(x_BHT: torch.Tensor, rows: int) -> object:
    """A descriptor of x as (B H T), in blocks of so many."""
    from tinyllama.harness.kernels.gluon import described

    x = x_BHT.view(-1)
    return described(x if x.data_ptr() % 16 == 0 else x.clone(), (rows,))


def _launch(
    kernel: Any,
    config: Config,
    q: torch.Tensor,
    groups: int,
    heads: int,
    before: Sequence[object],
    behind: Sequence[int] = (),
) -> None:
    """Launch a kernel for the tiles of so many heads: the query's, or the groups' of keys and
    values. before, behind: its arguments before the sizes and behind them."""
    B, T, H, K = q.shape
    tiles = T // TILE * B * heads
    kernel[(min(processors_of(q.device), tiles),)](
        *before, T, H, groups, tiles, B * heads, *behind,
        D=K, STEP=config["STEP"], STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _slope(K: int) -> float:
    return math.log2(math.e) * K**-0.5


def forward(
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write o (B T H K), contiguous, and lse (B H T)."""
    from tinyllama.ops.attention.specialised_kernels import ROWS, specialised_forward_kernel

    (H, K), rows, step = q.shape[2:], ROWS.value, config["STEP"]
    before = (_rows(q, rows), _rows(k, step), _rows(v, step), _rows(o, rows), lse, _slope(K))
    _launch(specialised_forward_kernel, config, q, k.shape[2], H, before)


def backward_queries(
    config: Config,
    inputs: Sequence[torch.Tensor],
    dq: torch.Tensor,
    sums: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor | None],
    scaled: Sequence[torch.Tensor | None],
) -> None:
    """Write dq and delta. inputs: q, k, v, do, o; sums: lse, delta; tables: cos, sin; scaled: rstd
    and parts (see `attend_backward`)."""
    from tinyllama.ops.attention.specialised_backward_kernels import (
        ROWS,
        specialised_queries_kernel,
    )

    q, k, v, do, o = inputs
    (H, K), rows, step = q.shape[2:], ROWS.value, config["STEP"]
    read = (_rows(q, rows), _rows(k, step), _rows(v, step), _rows(do, rows), o, *sums)
    before = (*read, *tables, dq, *scaled, _slope(K), K**-0.5)
    _launch(specialised_queries_kernel, config, q, k.shape[2], H, before, dq.stride()[:3])


def backward_keys(
    config: Config,
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor | None],
    scaled: Sequence[torch.Tensor | None],
) -> None:
    """Write dk and dv, the gradients. inputs: q, k, v, do; the rest as in `backward_queries`."""
    from tinyllama.ops.attention.specialised_backward_kernels import ROWS, specialised_keys_kernel

    q, k, v, do = inputs
    K, G, rows, step = q.shape[3], k.shape[2], ROWS.value, config["STEP"]
    read = (_rows(q, step), _rows(k, rows), _rows(v, rows), _rows(do, step))
    along = [_along(x, step) for x in sums]
    before = (*read, *along, *tables, *gradients, *scaled, _slope(K), K**-0.5)
    strides = [stride for x in gradients for stride in x.stride()[:3]]
    _launch(specialised_keys_kernel, config, q, G, G, before, strides)
