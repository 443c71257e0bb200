"""The tree's query, key and value projections, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.qkv import qkv as op


class Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_q, w_k, w_v):
        ctx.save_for_backward(x, w_q, w_k, w_v)
        q = x @ w_q.T
        k = x @ w_k.T
        v = x @ w_v.T
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        x, w_q, w_k, w_v = (tensor.to(dq.dtype) for tensor in ctx.saved_tensors)
        dx = dq @ w_q + dk @ w_k + dv @ w_v
        dw_q = dq.flatten(0, 1).T @ x.flatten(0, 1)
        dw_k = dk.flatten(0, 1).T @ x.flatten(0, 1)
        dw_v = dv.flatten(0, 1).T @ x.flatten(0, 1)
        grads = zip((dx, dw_q, dw_k, dw_v), ctx.saved_tensors, strict=True)
        return tuple(grad.to(tensor.dtype) for grad, tensor in grads)


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,))
def candidate(x, w_q, w_k, w_v):
    return Projections.apply(x, w_q, w_k, w_v)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_x_lost", ("apply(x, w_q", "apply(x.detach(), w_q")),
    missing("gradient_of_x_zero", ("zip((dx,", "zip((torch.zeros_like(dx),"), result="grad x"),
    constant("gradient_of_x_1_percent_off", ("zip((dx,", "zip((1.01 * dx,"), result="grad x"),
    *(
        constant(
            f"gradient_of_{w}_1_percent_off", (f"d{w} = ", f"d{w} = 1.01 * "), result=f"grad {w}"
        )
        for w in ("w_q", "w_k", "w_v")
    ),
    *(
        constant(f"{y}_1_percent_off", (f"    {y} = x", f"    {y} = 1.01 * x"), result=y)
        for y in ("q", "k", "v")
    ),
    # The last element of the last row stays as it was allocated.
    *(
        wrong(
            f"tail_of_{y}_unwritten",
            (
                f"        {y} = x @ w_{y}.T\n",
                f"""        {y} = x.new_empty((*x.shape[:-1], w_{y}.shape[0]))
        {y}.view(-1)[:-1] = (x @ w_{y}.T).view(-1)[:-1]
""",
            ),
            fault="tail",
            result=y,
            rank="unsafe",
        )
        for y in ("q", "k", "v")
    ),
    # An operand of a product is rounded to ten bits of mantissa.
    wrong(
        "product_in_tf32",
        ("v = x @ w_v.T", "v = x @ in_tf32(w_v).T"),
        (
            "class Projections",
            """def in_tf32(w):
    bits = (w.float().view(torch.int32) + 0x1000) & ~0x1FFF
    return bits.view(torch.float32).to(w.dtype)


class Projections""",
        ),
        fault="accumulation",
        result="v",
        as_reference=True,
    ),
]
