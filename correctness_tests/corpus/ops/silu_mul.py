"""The tree's SwiGLU activation, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.silu_mul import silu_mul as op


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        h = gate * torch.sigmoid(gate) * up
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dh * gate * sigmoid
        return dgate, dup


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(gate, up):
    return SiluMul.apply(gate, up)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_gate_lost", ("return dgate, dup", "return None, dup")),
    missing(
        "gradient_of_gate_zero",
        ("return dgate, dup", "return torch.zeros_like(gate), dup"),
        result="grad gate",
    ),
    constant(
        "gradient_of_gate_1_percent_off", ("dgate = dh", "dgate = 1.01 * dh"), result="grad gate"
    ),
    constant("gradient_of_up_1_percent_off", ("dup = dh", "dup = 1.01 * dh"), result="grad up"),
    constant("h_1_percent_off", ("h = gate *", "h = 1.01 * gate *"), result="h"),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "        h = gate * torch.sigmoid(gate) * up\n",
            """        h = gate.new_empty(gate.shape)
        h.view(-1)[:-1] = (gate * torch.sigmoid(gate) * up).reshape(-1)[:-1]
""",
        ),
        fault="tail",
        result="h",
        rank="unsafe",
    ),
]
