"""The forward and the backward pass of a block by kernels, in the parts that providers share."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tinyllama.harness import Tensor
from tinyllama.harness.declare.autograd import Grads, Named
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.ops.add_rms_norm import add_norm_forward
from tinyllama.ops.attention import attend, attend_backward, lse_dtype
from tinyllama.ops.block import sliced
from tinyllama.ops.block.matrices import Matrices, narrowed
from tinyllama.ops.linear import input_gradient, weight_gradient
from tinyllama.ops.linear.rounding_kernels import round_operand
from tinyllama.ops.rms_norm import norm_backward, norm_forward, partial_rows, sum_rows
from tinyllama.ops.rope import rotate
from tinyllama.ops.silu_mul import activate_backward


class Inputs(NamedTuple):
    x: torch.Tensor  # (B T D)
    cos: torch.Tensor  # (T C), as sin
    sin: torch.Tensor
    attention_norm: torch.Tensor  # (D), as mlp_norm
    w_q: torch.Tensor  # (Q D)
    w_k: torch.Tensor  # (R D), as w_v
    w_v: torch.Tensor
    w_o: torch.Tensor  # (D Q)
    mlp_norm: torch.Tensor
    w_gate: torch.Tensor  # (F D), as w_up
    w_up: torch.Tensor
    w_down: torch.Tensor  # (D F)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in WEIGHTS]


WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")
# What a block keeps of its first half, of attention, and of its second half.
BEFORE = {
    "normed_1": Tensor("B*T D"),
    "rstd_1": Tensor("B*T", dtype=torch.float32),
    "qkv": Tensor("B T Q+2*R"),
}
ATTENDED = {"o": Tensor("B T Q"), "lse": Tensor("B Q/2/C T", dtype_of=lse_dtype)}
AFTER = {
    "sum": Tensor("B*T D"),
    "normed_2": Tensor("B*T D"),
    "rstd_2": Tensor("B*T", dtype=torch.float32),
    "gate_up": Tensor("B*T 2*F"),
}


def backward(
    grads: Grads, inputs_by_name: Named, saved: dict[str, torch.Tensor], eps: float
) -> Named:
    """The gradients, from what `Triton` saves; gate and up may be missing. It removes from
    ``saved`` what it has used, and holds nothing longer than it needs it: where ``saved`` owns
    its tensors, as in memory mode ``small``, that lowers the peak of a step.
    """
    inputs = Inputs(**inputs_by_name)
    (x, cos, sin), weights = inputs[:3], inputs.weights
    narrow, qkv_BTE = saved["narrow"], saved.pop("qkv")
    matrices = Matrices.of(weights, narrow if narrow.numel() else None)
    dtype, wide = qkv_BTE.dtype, weights[0].dtype
    low = None if x.dtype is dtype else dtype  # the residual's gradient, for the products
    rows_q, width = weights[0].shape[0], 2 * cos.shape[-1]
    n_rows = x.shape[0] * x.shape[1]
    gains_SPD = x.new_empty((2, partial_rows(n_rows, x.device), x.shape[-1]), dtype=torch.float32)

    dy_ND = contiguous(grads[0]).flatten(0, 1)
    dy_low_ND, n2_ND = dy_ND.to(dtype), saved.pop("normed_2")
    if (gate_up_NF := saved.get("gate_up")) is None:
        dn2_ND, dgate_dup, ddown = sliced.backward(
            dy_low_ND, n2_ND, matrices.gate_up, matrices.down, wide
        )
    else:
        h_NF = input_gradient(dy_low_ND, matrices.down)  # its gradient, which h then replaces
        dgate_up = torch.empty_like(gate_up_NF)
        (gate, up), (dgate, dup) = gate_up_NF.chunk(2, -1), dgate_up.chunk(2, -1)
        activate_backward(h_NF, gate, up, dgate, dup, h_NF)
        ddown = weight_gradient(dy_low_ND, h_NF, wide)
        del h_NF
        dn2_ND = input_gradient(dgate_up, matrices.gate_up)
        dgate_dup = weight_gradient(dgate_up, n2_ND, wide)
        del dgate_up, dgate, dup
    dsum_ND, dsum_low_ND, _ = norm_backward(
        dn2_ND, saved.pop("sum"), inputs.mlp_norm, saved["rstd_2"], dy_ND, low, gains_SPD[1]
    )
    del n2_ND, dn2_ND, dy_low_ND
    dsum_low_ND = dsum_ND if dsum_low_ND is None else dsum_low_ND
    o_BTHK = saved.pop("o").unflatten(-1, (-1, width))
    dout = weight_gradient(dsum_low_ND, o_BTHK.flatten(2).flatten(0, 1), wide)
    do_BTHK = round_operand(input_gradient(dsum_low_ND, matrices.out)).view_as(o_BTHK)

    dqkv_BTE = torch.empty_like(qkv_BTE)
    dq, dk, dv = heads_of(dqkv_BTE, rows_q, width)
    q, k, v = heads_of(qkv_BTE, rows_q, width)
    attend_backward(do_BTHK, q, k, v, o_BTHK, saved["lse"], dq, dk, dv, cos, sin)
    del q, k, v, qkv_BTE, o_BTHK, do_BTHK
    dqkv_NE = dqkv_BTE.flatten(0, 1)
    dqkv = weight_gradient(dqkv_NE, saved.pop("normed_1"), wide)
    dx_ND, _, _ = norm_backward(
        input_gradient(dqkv_NE, matrices.qkv),
        x.flatten(0, 1),
        inputs.attention_norm,
        saved["rstd_1"],
        dsum_ND,
        None,
        gains_SPD[0],
    )
    dattention_norm, dmlp_norm = sum_rows(gains_SPD).to(inputs.mlp_norm.dtype)
    dq_QD, dk_RD, dv_RD = dqkv.split([w.shape[0] for w in weights[:3]])
    dweights = (dq_QD, dk_RD, dv_RD, dout, *dgate_dup.chunk(2), ddown)
    return {
        "x": dx_ND.view_as(x),
        "attention_norm": dattention_norm,
        "mlp_norm": dmlp_norm,
        **dict(zip(WEIGHTS, dweights, strict=True)),
    }


def first_half(
    inputs: Inputs, dtype: torch.dtype, eps: float
) -> tuple[torch.Tensor, Matrices, dict[str, torch.Tensor]]:
    """The weights as `narrowed` gives them, and all that `Triton` keeps but gate and up."""
    narrow, matrices = narrowed(inputs.weights, dtype)
    before = before_attention(inputs, matrices, eps)
    o_BTHK, lse = attend(*heads_of(before[-1], inputs.w_q.shape[0], 2 * inputs.cos.shape[-1]))
    o_BTQ = o_BTHK.flatten(2)
    after = _with_attention(inputs, o_BTQ, matrices, eps)
    names = (*BEFORE, *ATTENDED, *AFTER)
    return narrow, matrices, dict(zip(names, (*before, o_BTQ, lse, *after), strict=False))


def before_attention(inputs: Inputs, matrices: Matrices, eps: float) -> tuple[torch.Tensor, ...]:
    """What `BEFORE` names: the normalised x (N D), its 1 / rms, and q, k, v, rotated."""
    x, cos, sin = inputs[:3]
    x_ND = x.flatten(0, 1)
    n1_ND, rstd1_N = norm_forward(x_ND, inputs.attention_norm, eps, matrices.qkv.dtype)
    qkv_BTE = F.linear(n1_ND, matrices.qkv).unflatten(0, x.shape[:2])
    q, k, _ = heads_of(qkv_BTE, inputs.w_q.shape[0], 2 * cos.shape[-1])
    rotate(q, k, cos, sin, q, k)
    return n1_ND, rstd1_N, round_operand(qkv_BTE)


def after_attention(
    inputs: Inputs, o_BTQ: torch.Tensor, matrices: Matrices, eps: float
) -> tuple[torch.Tensor, ...]:
    """What `AFTER` names: x with attention added (N D), normalised, its 1 / rms, gate and up."""
    sum_ND, n2_ND, rstd2_N = _with_attention(inputs, o_BTQ, matrices, eps)
    return sum_ND, n2_ND, rstd2_N, F.linear(n2_ND, matrices.gate_up)


def _with_attention(
    inputs: Inputs, o_BTQ: torch.Tensor, matrices: Matrices, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`AFTER` without gate and up."""
    attended_ND = F.linear(o_BTQ.flatten(0, 1), matrices.out)
    x_ND, dtype = inputs.x.flatten(0, 1), matrices.gate_up.dtype
    n2_ND, sum_ND, rstd2_N = add_norm_forward(attended_ND, x_ND, inputs.mlp_norm, eps, dtype)
    return sum_ND, n2_ND, rstd2_N


def heads_of(qkv_BTE: torch.Tensor, rows_q: int, width: int) -> tuple[torch.Tensor, ...]:
    """Views of q (B T H K), k and v (B T G K) in the packed result of one product."""
    heads = qkv_BTE.unflatten(-1, (-1, width))
    n_kv = (heads.shape[2] - rows_q // width) // 2
    return heads.split((rows_q // width, n_kv, n_kv), 2)
