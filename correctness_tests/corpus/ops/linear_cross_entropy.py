"""The tree's output projection with cross-entropy, written in plain PyTorch."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.linear_cross_entropy import linear_cross_entropy as op


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, reduction):
        logits = x @ weight.T
        log_p = logits.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
        ignored = torch.zeros_like(targets, dtype=torch.bool)
        if ignore_index is not None:
            ignored = targets == ignore_index
        true = targets.masked_fill(ignored, 0)
        losses = -log_p.gather(-1, true[:, None])[:, 0].masked_fill(ignored, 0.0)
        count = (~ignored).sum()
        ctx.save_for_backward(x, weight, log_p, true, ignored, count)
        ctx.reduction = reduction
        if reduction == "none":
            return losses
        total = losses.sum()
        return total / count if reduction == "mean" else total

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        x, weight, log_p, true, ignored, count = ctx.saved_tensors
        if ctx.reduction == "mean":
            dloss = dloss / count
        upstream = dloss.expand(len(true)).masked_fill(ignored, 0.0)
        p = log_p.exp()
        one = torch.ones_like(p[:, :1])
        dlogits = p.scatter_add(-1, true[:, None], -one) * upstream[:, None]
        dx = dlogits @ weight.to(p.dtype)
        dweight = dlogits.T @ x.to(p.dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None


def wide(sizes):
    return None if sizes["V"] <= 100 else f"V = {sizes['V']}: up to 100 classes are quick"


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,), supports=wide)
def candidate(x, weight, targets, ignore_index, reduction):
    return LinearCrossEntropy.apply(x, weight, targets, ignore_index, reduction)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_of_x_lost", ("return dx.to(x.dtype)", "return None"), result="grad x"),
    missing(
        "gradient_of_x_zero", ("return dx.to", "return torch.zeros_like(dx).to"), result="grad x"
    ),
    constant("gradient_of_x_1_percent_off", ("dx = dlog", "dx = 1.01 * dlog"), result="grad x"),
    constant(
        "gradient_of_weight_1_percent_off",
        ("dweight = dlog", "dweight = 1.01 * dlog"),
        result="grad weight",
    ),
    constant("loss_1_percent_off", ("losses = -log_p", "losses = -1.01 * log_p"), result="loss"),
    constant(
        "mean_counts_ignored_targets",
        ("(~ignored).sum()", "ignored.new_ones(()) * targets.numel()"),
        result="loss",
    ),
    # Ignored tokens have the gradients of class 0.
    constant(
        "ignored_targets_keep_a_gradient",
        ("expand(len(true)).masked_fill(ignored, 0.0)", "expand(len(true))"),
    ),
    constant(
        "sum_has_the_gradient_of_the_mean", ('ctx.reduction == "mean"', 'ctx.reduction != "none"')
    ),
    constant(
        "one_upstream_gradient_for_all_tokens",
        ("dloss.expand(len(true))", "dloss.reshape(-1)[:1].expand(len(true))"),
    ),
    # An operand of a product is rounded to ten bits of mantissa.
    wrong(
        "product_in_tf32",
        ("x @ weight.T", "x @ in_tf32(weight).T"),
        (
            "class Linear",
            """def in_tf32(w):
    bits = (w.float().view(torch.int32) + 0x1000) & ~0x1FFF
    return bits.view(torch.float32).to(w.dtype)


class Linear""",
        ),
        fault="accumulation",
        as_reference=True,
    ),
]
