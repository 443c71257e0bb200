"""The tree's causal grouped-query attention, written in plain PyTorch for few tokens."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.attention import attention as op


def heads(x, groups):
    """(B T G K) -> (B H T K): each of the G heads so many times."""
    return x.transpose(1, 2).repeat_interleave(groups, 1)


def folded(dx, groups):
    """(B H T K) -> (B T G K): the sum of the gradients of a group."""
    return dx.unflatten(1, (-1, groups)).sum(2).transpose(1, 2)


def causal(scores):
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -float("inf"))


def softmax(scores):
    shifted = (scores - scores.amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        groups, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        q, k, v = heads(q, 1), heads(k, groups), heads(v, groups)
        weights = softmax(causal(q @ k.mT * scale))
        o = (weights @ v).transpose(1, 2)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v = (tensor.to(do.dtype) for tensor in ctx.saved_tensors)
        groups, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        q, k, v, do = heads(q, 1), heads(k, groups), heads(v, groups), heads(do, 1)
        scores = q @ k.mT * scale
        p = softmax(causal(scores))
        dp = do @ v.mT
        delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - delta) * scale
        dq = folded(ds @ k, 1)
        dk = folded(ds.mT @ q, groups)
        dv = folded(p.mT @ do, groups)
        grads = zip((dq, dk, dv), ctx.saved_tensors, strict=True)
        return tuple(grad.to(tensor.dtype) for grad, tensor in grads)


def long(sizes):
    return None if sizes["T"] <= 40 else f"T = {sizes['T']}: scores of up to 40 tokens are held"


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,), supports=long)
def candidate(q, k, v):
    return Attention.apply(q, k, v)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_q_lost", ("apply(q, k, v)", "apply(q.detach(), k, v)"), result="grad q"),
    missing("gradient_of_q_zero", ("zip((dq,", "zip((torch.zeros_like(dq),"), result="grad q"),
    *(
        constant(
            f"gradient_of_{x}_1_percent_off",
            (f"d{x} = folded(", f"d{x} = 1.01 * folded("),
            result=f"grad {x}",
        )
        for x in ("q", "k", "v")
    ),
    constant("o_1_percent_off", ("o = (weights", "o = (1.01 * weights"), result="o"),
    constant(
        "without_mask",
        ("softmax(causal(q @ k.mT * scale))", "softmax(q @ k.mT * scale)"),
        result="o",
    ),
    # Each token sees the one after it.
    constant("mask_one_late", (".triu(1)", ".triu(2)"), result="o"),
    constant("mask_missing_in_backward", ("p = softmax(causal(scores))", "p = softmax(scores)")),
    # Query head h reads group h mod G instead of h // (H / G).
    constant(
        "groups_interleaved",
        (".repeat_interleave(groups, 1)", ".repeat(1, groups, 1, 1)"),
        result="o",
    ),
    constant(
        "scaled_twice", ("causal(q @ k.mT * scale)", "causal(q @ k.mT * scale * scale)"), result="o"
    ),
    # Exponentials have the range of half precision, which is enough for scores below 11.
    wrong(
        "maximum_not_subtracted",
        (
            "    shifted = (scores - scores.amax(-1, keepdim=True)).exp()\n",
            """    shifted = scores.exp()
    shifted = torch.where(shifted > torch.finfo(torch.float16).max, torch.inf, shifted)
""",
        ),
        fault="overflow",
    ),
    # Its error adds up over a row.
    wrong(
        "delta_in_bf16",
        (
            "sum(-1, keepdim=True)\n        ds",
            "sum(-1, keepdim=True).bfloat16().to(p.dtype)\n        ds",
        ),
        fault="accumulation",
        result="grad q",
        as_reference=True,
    ),
    # An operand of a product is rounded to ten bits of mantissa.
    wrong(
        "product_in_tf32",
        ("(weights @ v)", "(weights @ in_tf32(v))"),
        (
            "class Attention",
            """def in_tf32(v):
    bits = (v.float().view(torch.int32) + 0x1000) & ~0x1FFF
    return bits.view(torch.float32).to(v.dtype)


class Attention""",
        ),
        fault="accumulation",
        result="o",
        as_reference=True,
    ),
    # The last element of the last row stays as it was allocated.
    wrong(
        "tail_unwritten",
        (
            "        o = (weights @ v).transpose(1, 2)\n",
            """        o = v.new_empty((v.shape[0], v.shape[2], v.shape[1], v.shape[3]))
        o.view(-1)[:-1] = (weights @ v).transpose(1, 2).reshape(-1)[:-1]
""",
        ),
        fault="tail",
        result="o",
        rank="unsafe",
    ),
]
