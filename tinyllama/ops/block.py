"""One pre-norm transformer block, and the only place where its ops are put together.

    a = rms_norm(x); x = x + Wo attention(rope(qkv(a)))
    b = rms_norm(x); x = x + Wd swiglu(b)

`compose` builds the block from any table of ops: from their references it is this op's
oracle, from a tier's providers it is what the model runs. A provider may replace it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal
from tinyllama.ops.add_rms_norm import add_rms_norm
from tinyllama.ops.attention import SDPA_SLACK, attention
from tinyllama.ops.qkv import qkv
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.ops.rope import COS, SIN, rope
from tinyllama.ops.swiglu import swiglu

PARTS: Mapping[str, Op] = {
    op.name: op for op in (rms_norm, qkv, rope, attention, add_rms_norm, swiglu)
}

GAIN = normal(0.3, mean=1.0)
WEIGHT = normal(0.15)


def _flops(per_token: int, per_score: int) -> Callable[..., float]:
    def count(B: int, T: int, D: int, Q: int, R: int, F: int, C: int) -> float:
        weights = D * (2 * Q + 2 * R + 3 * F)
        return per_token * B * T * weights + per_score * B * T * (T + 1) * Q

    return count


block = Op(
    "block",
    inputs={
        "x": Tensor("B T D", grad=True),
        "cos": COS,
        "sin": SIN,
        "attention_norm": Tensor("D", grad=True, values=GAIN),
        "w_q": Tensor("Q D", grad=True, values=WEIGHT),
        "w_k": Tensor("R D", grad=True, values=WEIGHT),
        "w_v": Tensor("R D", grad=True, values=WEIGHT),
        "w_o": Tensor("D Q", grad=True, values=WEIGHT),
        "mlp_norm": Tensor("D", grad=True, values=GAIN),
        "w_gate": Tensor("F D", grad=True, values=WEIGHT),
        "w_up": Tensor("F D", grad=True, values=WEIGHT),
        "w_down": Tensor("D F", grad=True, values=WEIGHT),
    },
    params={"eps": 1e-5},
    outputs={"y": "B T D"},
    cases=[
        # A sequence of one token is left out: its query gradients are zero by cancellation,
        # which the attention op's own case covers with the magnitude of the terms.
        Case(B=2, T=9, D=32, Q=32, R=16, F=48, C=8),
        Case(B=1, T=33, D=48, Q=64, R=64, F=40, C=16, why="Q wider than D, no grouping"),
        Case(B=3, T=2, D=16, Q=8, R=8, F=24, C=4, why="one head"),
    ],
    timed=[
        Case(B=4, T=64, D=128, Q=128, R=64, F=256, C=16),
        Case(B=8, T=128, D=512, Q=512, R=256, F=2048, C=32),
    ],
    extremes={"tiny": {"x": normal(2e-3)}, "huge": {"x": normal(100.0)}},
    bytes={
        "forward": lambda size, B, T, D, Q, R, F, C: (
            (2 * B * T * D + D * (2 * Q + 2 * R + 3 * F) + 2 * D) * size
        ),
        "backward": lambda size, B, T, D, Q, R, F, C: (
            (3 * B * T * D + 2 * D * (2 * Q + 2 * R + 3 * F) + 4 * D) * size
        ),
    },
    flops={"forward": _flops(2, 2), "backward": _flops(4, 5)},
)


def compose(table: Mapping[str, Callable[..., Any]]) -> Callable[..., torch.Tensor]:
    """The block made of these ops; ``table`` maps the names in `PARTS` to callables."""
    norm, project, rotate = table["rms_norm"], table["qkv"], table["rope"]
    attend, add_norm, gate = table["attention"], table["add_rms_norm"], table["swiglu"]

    def composed(
        x_BTD: torch.Tensor,
        cos_TC: torch.Tensor,
        sin_TC: torch.Tensor,
        attention_norm_D: torch.Tensor,
        w_q_QD: torch.Tensor,
        w_k_RD: torch.Tensor,
        w_v_RD: torch.Tensor,
        w_o_DQ: torch.Tensor,
        mlp_norm_D: torch.Tensor,
        w_gate_FD: torch.Tensor,
        w_up_FD: torch.Tensor,
        w_down_DF: torch.Tensor,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """x (B T D), tables (T C), weights (out in) -> y (B T D)."""
        heads = (-1, 2 * cos_TC.shape[-1])
        q_BTQ, k_BTR, v_BTR = project(
            norm(x_BTD, attention_norm_D, eps=eps), w_q_QD, w_k_RD, w_v_RD
        )
        q_BTHK, k_BTGK = rotate(
            q_BTQ.unflatten(-1, heads), k_BTR.unflatten(-1, heads), cos_TC, sin_TC
        )
        o_BTHK = attend(q_BTHK, k_BTGK, v_BTR.unflatten(-1, heads))
        attended_BTD = F.linear(o_BTHK.flatten(-2), w_o_DQ)
        n_BTD, x_BTD = add_norm(attended_BTD, x_BTD, mlp_norm_D, eps=eps)
        return x_BTD + F.linear(gate(n_BTD, w_gate_FD, w_up_FD), w_down_DF)

    return composed


eager = block.reference(compose({name: op["eager"].call for name, op in PARTS.items()}))

block.provider("torch", deterministic=frozenset({"cpu"}), double_backward=False, slack=SDPA_SLACK)(
    compose({name: op["torch"].call for name, op in PARTS.items()})
)


@block.independent("torch.nn.functional, end to end")
def stock(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_norm: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    w_o: torch.Tensor,
    mlp_norm: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Stock functions only; none of the code above takes part."""
    turn_T1C = torch.polar(torch.ones_like(cos), torch.atan2(sin, cos))[:, None]

    def heads(y: torch.Tensor, turned: bool) -> torch.Tensor:
        y = y.unflatten(-1, (-1, cos.shape[-1], 2))
        y = torch.view_as_real(torch.view_as_complex(y) * turn_T1C) if turned else y
        return y.flatten(-2).transpose(1, 2)

    a = F.rms_norm(x, (x.shape[-1],), attention_norm, eps)
    o = F.scaled_dot_product_attention(
        heads(F.linear(a, w_q), True),
        heads(F.linear(a, w_k), True),
        heads(F.linear(a, w_v), False),
        is_causal=True,
        enable_gqa=True,
    )
    x = x + F.linear(o.transpose(1, 2).flatten(-2), w_o)
    b = F.rms_norm(x, (x.shape[-1],), mlp_norm, eps)
    return x + F.linear(F.silu(F.linear(b, w_gate)) * F.linear(b, w_up), w_down)
