"""One pre-norm transformer block, and the only place where its ops are put together.

    a = rms_norm(x); x = x + Wo attention(rope(qkv(a)))
    b = rms_norm(x); x = x + Wd swiglu(b)

`compose` builds the block from any table of ops: from their references it is this op's
oracle, from a tier's providers it is what the model runs. A provider may replace it whole.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.harness.kernels.precision import compute_dtype
from tinyllama.ops.add_rms_norm import add_rms_norm
from tinyllama.ops.attention import (
    SDPA_SLACK,
    attend,
    attention,
    ungrouped,
)
from tinyllama.ops.block import passes, sliced
from tinyllama.ops.block.matrices import narrowed
from tinyllama.ops.block.passes import AFTER, ATTENDED, BEFORE, Inputs
from tinyllama.ops.block.terms import weight_terms
from tinyllama.ops.qkv import qkv
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.ops.rope import COS, SIN, rope
from tinyllama.ops.silu_mul import activate
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


def unfit(sizes: Mapping[str, Any]) -> str | None:
    """What is wrong with the sizes of the projections: they are whole heads, 2 C wide."""
    Q, R, width = sizes["Q"], sizes["R"], 2 * sizes["C"]
    if not width or Q % width or R % width:
        return f"Q = {Q} and R = {R} are not whole heads of 2 C = {width}: change one of them"
    return ungrouped(Q // width, R // width)


block = Op(
    "block",
    fits=unfit,
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
        Case(B=2, T=9, D=32, Q=32, R=16, F=48, C=8),
        Case(B=1, T=33, D=48, Q=64, R=64, F=40, C=16, why="Q wider than D, no grouping"),
        Case(B=3, T=2, D=16, Q=8, R=8, F=24, C=4, why="one head"),
        Case(B=2, T=1, D=16, Q=8, R=8, F=8, C=2, why="one token: no gradient of w_q and w_k"),
    ],
    timed=[
        Case(B=4, T=64, D=128, Q=128, R=64, F=256, C=16),
        Case(B=8, T=128, D=512, Q=512, R=256, F=2048, C=32),
    ],
    slowdowns={"device_seconds": 0.10},  # gaps between short kernels are a process's own
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


@block.random_dims
def _sizes(draw: Callable[[int, int], int]) -> dict[str, int]:
    groups, pairs = draw(1, 2), draw(1, 8)
    # The query's gradient of one token alone is zero by cancellation; see the cases.
    sizes = {"B": draw(1, 2), "T": draw(2, 13), "D": draw(8, 40), "F": draw(1, 40)}
    return {**sizes, "Q": groups * draw(1, 3) * 2 * pairs, "R": groups * 2 * pairs, "C": pairs}


def compose(table: Mapping[str, Callable[..., Any]]) -> Callable[..., torch.Tensor]:
    """The block made of these ops; ``table`` maps the names in `PARTS` to callables.

    It takes x (B T D), tables (T C) and weights (out in), in the order of `Inputs`; -> y (B T D).
    """
    norm, project, rotate = table["rms_norm"], table["qkv"], table["rope"]
    attend, add_norm, gate = table["attention"], table["add_rms_norm"], table["swiglu"]

    def composed(inputs: Inputs, eps: float = 1e-5) -> torch.Tensor:
        x_BTD, cos_TC, sin_TC = inputs[:3]
        heads = (-1, 2 * cos_TC.shape[-1])
        normed_BTD = norm(x_BTD, inputs.attention_norm, eps=eps)
        q_BTQ, k_BTR, v_BTR = project(normed_BTD, inputs.w_q, inputs.w_k, inputs.w_v)
        q_BTHK, k_BTGK = rotate(
            q_BTQ.unflatten(-1, heads), k_BTR.unflatten(-1, heads), cos_TC, sin_TC
        )
        o_BTHK = attend(q_BTHK, k_BTGK, v_BTR.unflatten(-1, heads))
        attended_BTD = F.linear(o_BTHK.flatten(-2), inputs.w_o)
        n_BTD, x_BTD = add_norm(attended_BTD, x_BTD, inputs.mlp_norm, eps=eps)
        return x_BTD + F.linear(gate(n_BTD, inputs.w_gate, inputs.w_up), inputs.w_down)

    return spread(composed)


eager = block.reference(compose({name: op["eager"].call for name, op in PARTS.items()}))
block.magnitude(weight_terms(compose, PARTS), shared=True)
block.provider("torch", deterministic=frozenset({"cpu"}), double_backward=False, slack=SDPA_SLACK)(
    compose({name: op["torch"].call for name, op in PARTS.items()})
)


LARGE = (Large("B", "2*T*F", {"T": 8, "D": 64, "Q": 64, "R": 32, "F": 256, "C": 16}),)


READS = dict.fromkeys(Inputs._fields, contiguous)  # copied once, where they are not


def _unsupported(dims: Mapping[str, Any]) -> str | None:
    """What the kernels of a block's ops do not support."""
    return PARTS["rms_norm"]["triton"].supports(dims) or PARTS["attention"]["triton"].supports(
        {**dims, "K": 2 * dims["C"]}
    )


@block.provider(
    "triton",
    requires=("triton",),
    supports=_unsupported,
    keep=Inputs._fields,
    reads=READS,
    saved={
        "narrow": Tensor("0"),  # the weights in autocast's dtype; empty without autocast
        **BEFORE,
        **ATTENDED,
        **AFTER,
    },
    large=LARGE,
)
class Triton:
    """The kernels of the other ops, put together by hand: projections of one input are one
    product, rotation works in place, residual gradients are added inside the norms' kernels.

    Products are the vendor's BLAS, in autocast's dtype where it is on; the residual stream and
    all statistics keep x's dtype or float32.
    """

    @staticmethod
    def forward(inputs: Inputs, eps: float) -> tuple[torch.Tensor, ...]:
        x, rows_q = inputs.x, inputs.w_q.shape[0]
        narrow, matrices = narrowed(inputs.weights, compute_dtype(x))
        before = passes.before_attention(inputs, matrices, eps)
        o_BTHK, lse_BHT = attend(*passes.heads_of(before[-1], rows_q, 2 * inputs.cos.shape[-1]))
        o_BTQ = o_BTHK.flatten(2)
        after = passes.after_attention(inputs, o_BTQ, matrices, eps)
        h_NF = activate(*after[-1].chunk(2, -1))
        y = torch.add(after[0], F.linear(h_NF, matrices.down)).view_as(x)
        return y, narrow, *before, o_BTQ, lse_BHT, *after

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs, eps: float) -> Named:
        return passes.backward(grads, inputs, dict(saved), eps)


@block.provider(
    "selective",
    requires=("triton",),
    supports=_unsupported,
    keep=Inputs._fields,
    reads=READS,
    saved=ATTENDED,
    large=LARGE,
)
class Selective:
    """`Triton`, bit for bit, that keeps what attention gave and computes all else again in the
    backward pass (selective recomputation, Korthikanti et al., arXiv 2205.05198)."""

    @staticmethod
    def forward(inputs: Inputs, eps: float) -> tuple[torch.Tensor, ...]:
        y, _, *saved = Triton.forward(inputs, eps)
        return y, *saved[len(BEFORE) :][: len(ATTENDED)]

    @staticmethod
    def backward(
        grads: Grads, inputs_by_name: Named, saved: Named, needs: Needs, eps: float
    ) -> Named:
        inputs, o_BTQ = Inputs(**inputs_by_name), saved["o"]
        narrow, matrices = narrowed(inputs.weights, o_BTQ.dtype)
        before = passes.before_attention(inputs, matrices, eps)
        after = passes.after_attention(inputs, o_BTQ, matrices, eps)
        again = zip((*BEFORE, *AFTER), (*before, *after), strict=True)
        return passes.backward(
            grads, inputs_by_name, {"narrow": narrow, **saved, **dict(again)}, eps
        )


@block.provider(
    "small",
    requires=("triton",),
    supports=_unsupported,
    keep=Inputs._fields,
    reads=READS,
    saved={"none": Tensor("0")},  # in the dtype of the products
    large=(Large("B", "2*T*Q", {"T": 8, "D": 64, "Q": 64, "R": 32, "F": 8, "C": 16}),),
)
class Small:
    """`Triton`, but it keeps only its inputs. Of tensors that are F or 2 F wide, it holds one slice
    of rows at a time, forward and backward; see `sliced`."""

    @staticmethod
    def forward(inputs: Inputs, eps: float) -> tuple[torch.Tensor, ...]:
        _, matrices, half = passes.first_half(inputs, compute_dtype(inputs.x), eps)
        sum_ND, n2_ND = half["sum"], half["normed_2"]
        y_ND = sliced.forward(sum_ND, n2_ND, matrices.gate_up, matrices.down)
        return y_ND.view_as(inputs.x), n2_ND.new_empty(0)

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs, eps: float) -> Named:
        narrow, _, half = passes.first_half(Inputs(**inputs), saved["none"].dtype, eps)
        half["narrow"] = narrow
        return passes.backward(grads, inputs, half, eps)


@block.independent("torch.nn.functional, end to end")
def stock(inputs: Inputs, eps: float) -> torch.Tensor:
    """Stock functions only; none of the code above takes part."""
    x, cos, sin = inputs[:3]
    turn_T1C = torch.polar(torch.ones_like(cos), torch.atan2(sin, cos))[:, None]

    def heads(y: torch.Tensor, turned: bool) -> torch.Tensor:
        y = y.unflatten(-1, (-1, cos.shape[-1], 2))
        y = torch.view_as_real(torch.view_as_complex(y) * turn_T1C) if turned else y
        return y.flatten(-2).transpose(1, 2)

    a = F.rms_norm(x, (x.shape[-1],), inputs.attention_norm, eps)
    o = F.scaled_dot_product_attention(
        heads(F.linear(a, inputs.w_q), True),
        heads(F.linear(a, inputs.w_k), True),
        heads(F.linear(a, inputs.w_v), False),
        is_causal=True,
        enable_gqa=True,
    )
    x = x + F.linear(o.transpose(1, 2).flatten(-2), inputs.w_o)
    b = F.rms_norm(x, (x.shape[-1],), inputs.mlp_norm, eps)
    return x + F.linear(
        F.silu(F.linear(b, inputs.w_gate)) * F.linear(b, inputs.w_up), inputs.w_down
    )
