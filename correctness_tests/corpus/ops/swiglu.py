"""The tree's SwiGLU, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.swiglu import swiglu as op


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_gate, w_up):
        gate = x @ w_gate.T
        up = x @ w_up.T
        ctx.save_for_backward(x, w_gate, w_up, gate, up)
        h = gate * torch.sigmoid(gate) * up
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        x, w_gate, w_up, gate, up = (tensor.to(dh.dtype) for tensor in ctx.saved_tensors)
        sigmoid = torch.sigmoid(gate)
        dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dh * gate * sigmoid
        dx = dgate @ w_gate + dup @ w_up
        dw_gate = dgate.flatten(0, 1).T @ x.flatten(0, 1)
        dw_up = dup.flatten(0, 1).T @ x.flatten(0, 1)
        grads = zip((dx, dw_gate, dw_up), ctx.saved_tensors[:3], strict=True)
        return tuple(grad.to(tensor.dtype) for grad, tensor in grads)


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(x, w_gate, w_up):
    return SwiGLU.apply(x, w_gate, w_up)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_x_lost", ("apply(x, w_gate", "apply(x.detach(), w_gate"), result="grad x"),
    missing("gradient_of_x_zero", ("zip((dx,", "zip((torch.zeros_like(dx),"), result="grad x"),
    constant("gradient_of_x_1_percent_off", ("zip((dx,", "zip((1.01 * dx,"), result="grad x"),
    *(
        constant(
            f"gradient_of_{w}_1_percent_off", (f"d{w} = ", f"d{w} = 1.01 * "), result=f"grad {w}"
        )
        for w in ("w_gate", "w_up")
    ),
    constant("h_1_percent_off", ("h = gate *", "h = 1.01 * gate *"), result="h"),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "        h = gate * torch.sigmoid(gate) * up\n",
            """        h = torch.empty_like(gate)
        h.view(-1)[:-1] = (gate * torch.sigmoid(gate) * up).view(-1)[:-1]
""",
        ),
        fault="tail",
        result="h",
        rank="unsafe",
    ),
    # An operand of a product is rounded to ten bits of mantissa.
    wrong(
        "product_in_tf32",
        ("x @ w_up.T", "x @ in_tf32(w_up).T"),
        (
            "class SwiGLU",
            """def in_tf32(w):
    bits = (w.float().view(torch.int32) + 0x1000) & ~0x1FFF
    return bits.view(torch.float32).to(w.dtype)


class SwiGLU""",
        ),
        fault="accumulation",
        result="h",
        as_reference=True,
    ),
]
