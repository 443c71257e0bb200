"""The tree's stack of transformer blocks, by torch's own functions, for few tokens."""

import torch
import torch.nn.functional as F

from tinyllama.ops.stack import stack as op


def turned(x, turn):
    """(B T H K) -> (B H T K), its pairs turned by complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).transpose(1, 2)


def block(x, turn, eps, attention_norm, w_q, w_k, w_v, w_o, mlp_norm, w_gate, w_up, w_down):
    width = x.shape[-1:]
    a = F.rms_norm(x, width, attention_norm, eps)
    q, k, v = (F.linear(a, w).unflatten(-1, (-1, 2 * turn.shape[-1])) for w in (w_q, w_k, w_v))
    groups = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(groups, 2) for tensor in (k, v))
    o = F.scaled_dot_product_attention(
        turned(q, turn), turned(k, turn), v.transpose(1, 2), is_causal=True
    )
    x = x + F.linear(o.transpose(1, 2).flatten(-2), w_o)
    b = F.rms_norm(x, width, mlp_norm, eps)
    return x + F.linear(F.silu(F.linear(b, w_gate)) * F.linear(b, w_up), w_down)


def long(sizes):
    return None if sizes["T"] <= 5 else f"T = {sizes['T']}: up to 5 tokens are quick"


@op.provider("of_torch", dtypes=(torch.float32,), double_backward=False, supports=long)
def candidate(x, cos, sin, attention_norm, w_q, w_k, w_v, w_o, mlp_norm, w_gate, w_up, w_down, eps):
    turn = torch.complex(cos, sin)
    weights = (attention_norm, w_q, w_k, w_v, w_o, mlp_norm, w_gate, w_up, w_down)
    y = x
    for layer in zip(*weights, strict=True):
        y = block(y, turn, eps, *layer)
    return y


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)


def with_gradient_times(factor, name):
    """The same value, and a gradient times a factor."""
    return (
        "    turn = torch.complex(cos, sin)\n",
        f"""    {name} = {name}.detach() + {factor} * ({name} - {name}.detach())
    turn = torch.complex(cos, sin)
""",
    )


WEIGHTS = ("attention_norm", "w_q", "w_k", "w_v", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
VARIANTS = [
    right(open="its process ended by a division by zero in empty batch, with torch 2.11"),
    missing("gradient_of_x_lost", ("    y = x\n", "    y = x.detach()\n"), result="grad x"),
    missing("gradient_of_x_zero", with_gradient_times(0.0, "x"), result="grad x"),
    *(
        constant(
            f"gradient_of_{name}_1_percent_off",
            with_gradient_times(1.01, name),
            result=f"grad {name}",
        )
        for name in ("x", *WEIGHTS)
    ),
    constant("y_1_percent_off", ("return y", "return 1.01 * y"), result="y"),
    constant(
        "epsilon_dropped", ("y = block(y, turn, eps, *layer)", "y = block(y, turn, 0.0, *layer)")
    ),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "    return y",
            """    written = y.new_empty(y.shape)
    written.view(-1)[:-1] = y.reshape(-1)[:-1]
    return written""",
        ),
        fault="tail",
        result="y",
        rank="unsafe",
    ),
]
