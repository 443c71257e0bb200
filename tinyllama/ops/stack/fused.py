"""A block in several launches: products with everything else in their epilogues."""

from __future__ import annotations

import torch

from tinyllama.harness.kernels import dependent
from tinyllama.ops.attention import attend, attend_backward
from tinyllama.ops.block import heads_of
from tinyllama.ops.stack import launches
from tinyllama.ops.stack.in_one import attend as attend_in_one
from tinyllama.ops.stack.in_one import chosen
from tinyllama.ops.stack.launches import ATTENTION_GRADIENT, DOWN, MLP_GRADIENT, OUT
from tinyllama.ops.stack.passes import Backward, Forward, heads_and_width


class InSeveral:
    """Each product is a launch, and so is attention, unless it is in one with its product."""

    def __init__(self, x_BTD: torch.Tensor, layers: int) -> None:
        self.options, self.width = dependent(x_BTD.device), x_BTD.shape[-1]

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        w, qkv, o, lse, rstd, eps = block.w, block.qkv, block.o, block.lse, block.rstd, block.eps
        n_heads, groups, width = heads_and_width(qkv, o, block.cos)
        in_one = chosen(qkv, width)
        projected = (block.low_1, w.qkv, block.squares, rstd[0], block.cos, block.sin)
        if in_one is not None:
            attend_in_one(in_one, *projected, qkv, o, lse, eps)
        else:
            rotated = (n_heads + groups) * width
            launches.project(*projected, qkv.flatten(0, 1), rotated=rotated, eps=eps)
            q, k, v = heads_of(qkv, n_heads * width, width)
            attend(q, k, v, into=(o.unflatten(-1, (-1, width)), lse), options=self.options)
        squares = launches.add_product(
            *(OUT, o.flatten(0, 1), w.out, block.x, block.total, block.mlp_norm, block.low_2)
        )
        launches.gate(block.low_2, w.gate_up, squares, rstd[1], block.gate_up, block.h, eps)
        found = launches.add_product(DOWN, block.h, w.down, block.total, block.y, *block.after)
        return None if block.after[0] is None else found

    def backward(self, index: int, block: Backward) -> None:
        w, dout, rstd, o = block.w, block.dout, block.rstd, block.o
        width, rows_q = 2 * block.cos.shape[-1], o.shape[-1]
        parts = launches.hidden_gradient(
            block.dy_low, w.down, block.gate_up, rstd[1], block.dgate_up
        )
        launches.norm_gradient(
            *(MLP_GRADIENT, block.dgate_up, w.gate_up, parts, rstd[1], block.total),
            *(block.mlp_norm, block.dy, block.dsum),
            *(block.dsum_low, block.gains[1]),
        )
        o_BTHK = o.unflatten(-1, (-1, width))
        attend_backward(
            launches.input_product(dout, w.out).view_as(o_BTHK),
            *(*heads_of(block.qkv, rows_q, width), o_BTHK, block.lse),
            *(*heads_of(block.dqkv, rows_q, width), block.cos, block.sin),
            scaled=(rstd[0], block.per_head),
            options=self.options,
        )
        launches.norm_gradient(
            *(ATTENTION_GRADIENT, block.dqkv.flatten(0, 1), w.qkv, block.per_head, rstd[0]),
            *(block.x, block.attention_norm, block.dsum, block.dx),
            *(block.dx_low, block.gains[0]),
        )

    def tile_rows(
        self, qkv_BTE: torch.Tensor, gate_up_NU: torch.Tensor, head_dim: int
    ) -> tuple[int, int]:
        D = self.width
        return (
            launches.tile_rows(ATTENTION_GRADIENT, qkv_BTE.flatten(0, 1), D),
            launches.tile_rows(MLP_GRADIENT, gate_up_NU, D),
        )
