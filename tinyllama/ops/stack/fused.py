"""A block in several launches. Each product is either a kernel with everything else in its epilogue
or the vendor's BLAS with kernels of V3 behind it: a plan chooses for each of `configs.PRODUCTS`.

What follows a norm is scaled in one of two ways. Where the product behind a norm is fused, low = x
gain, the product's rows are multiplied by rstd, and gradients of its result are stored times rstd
(`tinyllama.ops.stack.kernels`). Where it is the vendor's, low is the norm of x, and nothing is
scaled. Either way the gradients of the weights are dW = dY^T low.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tinyllama.harness.kernels import dependent
from tinyllama.harness.kernels.configs import Space
from tinyllama.ops.attention import attend, attend_backward
from tinyllama.ops.block.passes import heads_of
from tinyllama.ops.linear import input_gradient, weight_gradient
from tinyllama.ops.linear.rounding_kernels import round_operand
from tinyllama.ops.rms_norm import partial_rows
from tinyllama.ops.rms_norm.kernels import launch_backward
from tinyllama.ops.rope import rotate
from tinyllama.ops.silu_mul import activate, activate_backward
from tinyllama.ops.stack import configs, launches
from tinyllama.ops.stack.configs import (
    ATTENTION_GRADIENT,
    DOWN,
    GATE_UP,
    HIDDEN_GRADIENT,
    MLP_GRADIENT,
    OUT,
    OUT_GRADIENT,
    QKV,
    WEIGHT_GRADIENTS,
)
from tinyllama.ops.stack.in_one import attend as attend_in_one
from tinyllama.ops.stack.in_one import chosen
from tinyllama.ops.stack.passes import Backward, Forward, Norm, Threes, heads_and_width
from tinyllama.ops.transpose import transposed


class InSeveral:
    """The launches of a block. ``plan``: the names of the products that are fused; None: those for
    which the chip's tables say so."""

    plan: frozenset[str] | None = None

    def __init__(self, x_BTD: torch.Tensor, layers: int) -> None:
        self.options, self.width = dependent(x_BTD.device), x_BTD.shape[-1]
        self._scale: torch.Tensor | None = None

    @classmethod
    def _fused(cls, space: Space, a_NI: torch.Tensor, columns: int) -> bool:
        """Whether the product of a (N inner) with so many columns is a kernel of ours."""
        if cls.plan is None:
            return configs.is_fused(space, a_NI, columns)
        return space.name.removeprefix("stack.") in cls.plan

    @staticmethod
    def turns(x: torch.Tensor, dtype: torch.dtype) -> int:
        return configs.turns(x, dtype)

    @classmethod
    def keeps_h(cls, low_ND: torch.Tensor, columns: int) -> bool:
        """With many rows h is not kept: the kernel behind the vendor's product makes it again."""
        few = len(low_ND) <= configs.MOST_KEPT
        return few or cls._fused(HIDDEN_GRADIENT, low_ND, columns)

    # -- forward ------------------------------------------------------------------------------

    def begin(self, x_ND: torch.Tensor, norm: Norm, columns: int) -> torch.Tensor | None:
        return self._normalise(x_ND, norm, self._fused(QKV, norm.low, columns))

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        w, o, total, gate_up = block.w, block.o, block.total, block.gate_up
        columns = w.qkv.shape[0]
        self._attend(block)
        folds = self._fused(GATE_UP, block.low_2, w.gate_up.shape[0])
        turned = block.turned
        norm = Norm(
            *(block.mlp_norm, block.low_2, block.rstd[1], block.eps), turned and turned.low_2
        )
        squares = self._add(OUT, o.flatten(0, 1), w.out, block.x, total, norm, folds)
        if folds:
            assert squares is not None
            result = (norm.rstd, gate_up, block.h, block.eps, turned and turned.h)
            launches.gate(block.low_2, w.gate_up, squares, *result)
        else:
            torch.mm(block.low_2, w.gate_up.T, out=gate_up)
            gate, up = gate_up.chunk(2, -1)
            activate(gate, up, into=block.h)
            if turned is not None:
                transposed(block.h, turned.h)
        folds = block.after is not None and self._fused(QKV, block.after.low, columns)
        return self._add(DOWN, block.h, w.down, total, block.y, block.after, folds)

    def _attend(self, block: Forward) -> None:
        """Write q, k and v, o and lse."""
        w, qkv, o, lse = block.w, block.qkv, block.o, block.lse
        n_heads, groups, width = heads_and_width(qkv, o, block.cos)
        q, k, v = heads_of(qkv, n_heads * width, width)
        qkv_turned = block.turned and block.turned.qkv
        if block.squares is None:
            torch.mm(block.low_1, w.qkv.T, out=qkv.flatten(0, 1))
            rotate(q, k, block.cos, block.sin, q, k)
            round_operand(qkv)
            if qkv_turned is not None:
                transposed(qkv.flatten(0, 1), qkv_turned)
        else:
            in_one = chosen(qkv, width)
            projected = (block.low_1, w.qkv, block.squares, block.rstd[0], block.cos, block.sin)
            if in_one is not None:
                attend_in_one(in_one, *projected, qkv, o, lse, block.eps)
                return
            rotated = (n_heads + groups) * width
            result = (qkv.flatten(0, 1), rotated, block.eps, qkv_turned)
            launches.project(*projected, *result)
        v_turned = None if qkv_turned is None else qkv_turned[(n_heads + groups) * width :]
        turned = block.turned and (v_turned, block.turned.o)
        into = o.unflatten(-1, (-1, width)), lse
        attend(q, k, v, into=into, turned=turned, options=self.options)

    def _add(
        self,
        space: Space,
        a_NI: torch.Tensor,
        w_DI: torch.Tensor,
        x_ND: torch.Tensor,
        total_ND: torch.Tensor,
        norm: Norm | None,
        folds: bool,
    ) -> torch.Tensor | None:
        """Write total = x + a W^T, and what the norm behind it writes; -> the squares of total
        where it ``folds``."""
        if self._fused(space, a_NI, w_DI.shape[0]):
            after = (norm.gain, norm.low, norm.turned) if norm is not None and folds else ()
            squares = launches.add_product(space, a_NI, w_DI, x_ND, total_ND, *after)
            if norm is None or folds:
                return squares if folds else None
            return self._normalise(total_ND, norm, folds)
        delta_ND = F.linear(a_NI, w_DI)
        if norm is None:
            torch.add(x_ND, delta_ND, out=total_ND)
            return None
        return self._normalise(x_ND, norm, folds, delta_ND, total_ND)

    @staticmethod
    def _normalise(
        x_ND: torch.Tensor,
        norm: Norm,
        folds: bool,
        delta_ND: torch.Tensor | None = None,
        total_ND: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """`launches.fold`; -> the squares where it ``folds``, else it is the norm itself."""
        return launches.fold(
            *(x_ND, norm.gain, norm.low),
            delta_ND=delta_ND,
            total_ND=total_ND,
            rstd_N=None if folds else norm.rstd,
            eps=norm.eps,
            low_turned=norm.turned,
        )

    # -- backward -----------------------------------------------------------------------------

    def begin_backward(
        self, dy_ND: torch.Tensor, low_ND: torch.Tensor, low_DN: torch.Tensor | None
    ) -> None:
        launches.fold(dy_ND, None, low_ND, low_turned=low_DN)

    def backward(self, index: int, block: Backward) -> None:
        w, dout, o, dqkv_NE = block.w, block.dout, block.o, block.dqkv.flatten(0, 1)
        width, rows_q = 2 * block.cos.shape[-1], o.shape[-1]
        turned = block.turned
        to_gate_up = to_out = to_qkv = None
        if turned is not None:
            to_gate_up, to_out, to_qkv = turned.w.gate_up, turned.w.out, turned.w.qkv
        folds = self._fused(GATE_UP, dout, w.gate_up.shape[0])
        self._norm_gradient(
            *(MLP_GRADIENT, block.dgate_up, w.gate_up, block.gate_up),
            *(self._activation_gradient(block, folds), block.rstd[1], folds),
            *(block.total, block.mlp_norm, block.dy),
            *(block.dsum, block.dsum_low, block.gains[1]),
            *(to_gate_up, turned and turned.dout),
        )
        do_QN = None
        if turned is not None and turned.qkv is not None:
            do_QN = dout.new_empty((rows_q, len(dout)))
        if self._fused(OUT_GRADIENT, dout, rows_q):
            do_NQ = launches.input_product(dout, w.out, to_out, do_QN)
        else:
            do_NQ = round_operand(_multiply(dout, w.out, to_out))
            if do_QN is not None:
                transposed(do_NQ, do_QN)
        do_BTHK = do_NQ.view(*o.shape[:2], -1, width)
        turns = None
        if turned is not None:
            ahead = None
            if turned.qkv is not None and do_QN is not None:
                q_turned, k_turned = turned.qkv[:rows_q], turned.qkv[rows_q:]
                ahead = q_turned, k_turned, do_QN
            turns = ahead, turned.dqkv
        scaled = None  # neither a scaled product nor one of ours follows
        if folds := self._fused(QKV, dout, w.qkv.shape[0]):
            scaled = block.rstd[0], block.per_head
        elif self._fused(ATTENTION_GRADIENT, dqkv_NE, w.qkv.shape[1]):
            scaled = self._ones(block.rstd[0]), block.per_head
        attend_backward(
            do_BTHK,
            *(*heads_of(block.qkv, rows_q, width), o.view_as(do_BTHK), block.lse),
            *(*heads_of(block.dqkv, rows_q, width), block.cos, block.sin),
            scaled=scaled,
            turned=turns,
            options=self.options,
        )
        self._norm_gradient(
            *(ATTENTION_GRADIENT, dqkv_NE, w.qkv, block.qkv.flatten(0, 1)),
            *(block.per_head, block.rstd[0], folds),
            *(block.x, block.attention_norm, block.dsum),
            *(block.dx, block.dx_low, block.gains[0]),
            *(to_qkv, turned and turned.dx),
        )

    def weight_gradients(self, threes: Threes, turned: bool) -> None:
        (dy, x, _), *_, (_, h, _) = threes
        rows_of_low, hidden = (x.T, h.shape[0]) if turned else (x, h.shape[1])
        if self._fused(WEIGHT_GRADIENTS, rows_of_low, hidden):
            launches.weight_gradients(threes, turned=turned)
            return
        for dy, x, dw in threes:
            if turned:
                torch.mm(dy, x.T, out=dw)
            else:
                weight_gradient(dy, x, dw.dtype, into=dw)

    def tile_rows(
        self, qkv_BTE: torch.Tensor, gate_up_NU: torch.Tensor, head_dim: int
    ) -> tuple[int, int]:
        def rows(space: Space, dy_NO: torch.Tensor) -> int:
            if self._fused(space, dy_NO, self.width):
                return launches.tile_rows(space, dy_NO, self.width)
            return partial_rows(len(dy_NO), dy_NO.device)

        return rows(ATTENTION_GRADIENT, qkv_BTE.flatten(0, 1)), rows(MLP_GRADIENT, gate_up_NU)

    def _ones(self, like_N: torch.Tensor) -> torch.Tensor:
        """What gradients are scaled by that are not scaled, made once for a pass."""
        if self._scale is None:
            self._scale = torch.ones_like(like_N)
        return self._scale

    def _activation_gradient(self, block: Backward, folds: bool) -> torch.Tensor | None:
        """Write the gradient of gate and up, times rstd where the norm ``folds``; -> the row sums
        of its products with gate and up, where the kernel gives them."""
        w, gate_up, dgate_up, rstd_N = block.w.down, block.gate_up, block.dgate_up, block.rstd[1]
        turned = block.turned
        turns = (None, None) if turned is None else (turned.w.down, turned.dgate_up)
        if self._fused(HIDDEN_GRADIENT, block.dy_low, w.shape[1]):
            scale_N = rstd_N if folds else self._ones(rstd_N)
            return launches.hidden_gradient(block.dy_low, w, gate_up, scale_N, dgate_up, *turns)
        dh_NF = _multiply(block.dy_low, w, turns[0])
        (gate, up), (dgate, dup) = gate_up.chunk(2, -1), dgate_up.chunk(2, -1)
        activate_backward(dh_NF, gate, up, dgate, dup, block.h)
        if folds:
            dgate_up.mul_(rstd_N[:, None])
        if turned is not None:
            transposed(dgate_up, turned.dgate_up)
        return None

    def _norm_gradient(
        self,
        space: Space,
        dy_NO: torch.Tensor,
        w_OD: torch.Tensor,
        y_NO: torch.Tensor,
        parts: torch.Tensor | None,
        rstd_N: torch.Tensor,
        folds: bool,
        x_ND: torch.Tensor,
        gain_D: torch.Tensor,
        dresidual_ND: torch.Tensor,
        dx_ND: torch.Tensor,
        dx_low_ND: torch.Tensor | None,
        dgain_PD: torch.Tensor,
        w_DO: torch.Tensor | None,
        dx_DN: torch.Tensor | None,
    ) -> None:
        """`launches.norm_gradient`; dy is times rstd where the norm ``folds``, and y is the result
        of the product, of which ``parts`` may be made."""
        gradients = gain_D, dresidual_ND, dx_ND, dx_low_ND, dgain_PD
        if self._fused(space, dy_NO, w_OD.shape[1]):
            if parts is None:
                parts = (dy_NO.float() * y_NO.float()).sum(-1, keepdim=True)
            product = (space, dy_NO, w_OD, parts, rstd_N, x_ND)
            launches.norm_gradient(*product, *gradients, scaled=folds, w_DO=w_DO, dx_DN=dx_DN)
            return
        dn_ND = _multiply(dy_NO, w_OD, w_DO)
        if folds:
            dn_ND.div_(rstd_N[:, None])
        partials = dgain_PD[: partial_rows(len(x_ND), x_ND.device)]
        launch_backward(dn_ND, x_ND, gain_D, rstd_N, dresidual_ND, dx_ND, dx_low_ND, partials)
        if dx_DN is not None:
            transposed(dx_ND, dx_DN)


def _multiply(dy_NO: torch.Tensor, w_OD: torch.Tensor, w_DO: torch.Tensor | None) -> torch.Tensor:
    """dx (N D) = dy W by the vendor's BLAS, from the transpose of W where that is given."""
    return input_gradient(dy_NO, w_OD) if w_DO is None else torch.mm(dy_NO, w_DO.T)
