"""The tree's transformer block, written in plain PyTorch for few tokens."""

import torch
import torch.nn.functional as F

from tinyllama.ops.block import block as op


def normed(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def attended(q, k, v):
    """(B T H K) and (B T G K) -> (B T H K)."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -float("inf"))
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return (weights.to(v.dtype) @ v).transpose(1, 2)


def long(sizes):
    return None if sizes["T"] <= 10 else f"T = {sizes['T']}: up to 10 tokens are quick"


@op.provider("written_out", dtypes=(torch.float32,), supports=long)
def candidate(x, cos, sin, attention_norm, w_q, w_k, w_v, w_o, mlp_norm, w_gate, w_up, w_down, eps):
    heads = (-1, 2 * cos.shape[-1])
    a = normed(x, attention_norm, eps)
    q, k, v = (F.linear(a, w).unflatten(-1, heads) for w in (w_q, w_k, w_v))
    o = attended(turned(q, cos, sin), turned(k, cos, sin), v)
    x = x + F.linear(o.flatten(-2), w_o)
    b = normed(x, mlp_norm, eps)
    h = F.silu(F.linear(b, w_gate)) * F.linear(b, w_up)
    y = x + F.linear(h, w_down)
    return y


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)


def with_gradient_times(factor, name):
    """The same value, and a gradient times a factor."""
    return (
        "    heads = (-1, 2 * cos.shape[-1])\n",
        f"""    {name} = {name}.detach() + {factor} * ({name} - {name}.detach())
    heads = (-1, 2 * cos.shape[-1])
""",
    )


WEIGHTS = ("attention_norm", "w_q", "w_k", "w_v", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
VARIANTS = [
    right(),
    missing(
        "gradient_of_x_lost",
        ("    heads = (-1", "    x = x.detach()\n    heads = (-1"),
        result="grad x",
    ),
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
    constant("epsilon_dropped", (" + eps)", ")")),
    constant(
        "mask_dropped", ('    scores = scores.masked_fill(later, -float("inf"))\n', ""), result="y"
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
    # An operand of a product is rounded to ten bits of mantissa.
    wrong(
        "product_in_tf32",
        ("F.linear(h, w_down)", "F.linear(h, in_tf32(w_down))"),
        (
            "def long",
            """def in_tf32(w):
    bits = (w.detach().float().view(torch.int32) + 0x1000) & ~0x1FFF
    return w + (bits.view(torch.float32).to(w.dtype) - w.detach())


def long""",
        ),
        fault="accumulation",
        result="y",
        as_reference=True,
    ),
]
