"""SwiGLU's activation in one kernel each way; the products before it are the BLAS library's.

h = silu(gate) up, silu(a) = a s with s = sigmoid(a). With the upstream gradient dh:
dgate = dh up s (1 + gate (1 - s)), dup = dh silu(gate).

Replace each ____ , then run `tinyllama check` on this file.
"""

import torch
import triton
import triton.language as tl

from tinyllama.ops.silu_mul import silu_mul
from tinyllama.workshop.blanks import refuse_blanks

refuse_blanks(__file__)

BLOCK_SIZE = 1024


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, h_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = ____
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(h_ptr + offsets, ____, mask=mask)


@triton.jit
def swiglu_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n_elements, BLOCK_SIZE: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = ____
    dh = tl.load(dh_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    s, rest = tl.sigmoid(gate), tl.sigmoid(-gate)
    tl.store(dgate_ptr + offsets, ____, mask=mask)
    tl.store(dup_ptr + offsets, ____, mask=mask)


@silu_mul.provider("lesson", keep=("gate", "up"), requires=("triton",))
class Lesson:
    @staticmethod
    def forward(gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        h, n = torch.empty_like(gate), gate.numel()
        if n:
            swiglu_kernel[(triton.cdiv(n, BLOCK_SIZE),)](gate, up, h, n, BLOCK_SIZE=BLOCK_SIZE)
        return h

    @staticmethod
    def backward(grads, kept, saved, needs):
        dh, gate, up = (t.contiguous() for t in (grads[0], kept["gate"], kept["up"]))
        dgate, dup, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if n:
            swiglu_backward_kernel[(triton.cdiv(n, BLOCK_SIZE),)](
                dh, gate, up, dgate, dup, n, BLOCK_SIZE=BLOCK_SIZE
            )
        return {"gate": dgate, "up": dup}
