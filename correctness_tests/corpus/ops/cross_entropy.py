"""The tree's cross-entropy, written in plain PyTorch, with its sums in blocks of 16 classes."""

import torch
from torch.autograd.function import once_differentiable

from tinyllama.ops.cross_entropy import cross_entropy as op


def log_sum_exp(logits):
    """Of each row, block after block: the largest logit, and the log of the sum beside it."""
    largest = torch.full_like(logits[:, 0], -float("inf"))
    total = torch.zeros_like(largest)
    for block in logits.split(16, -1):
        before, largest = largest, torch.maximum(largest, block.amax(-1))
        shift = largest.masked_fill(largest == -float("inf"), 0.0)
        rescale = (before - shift).exp()
        total = total * rescale + (block - shift[:, None]).exp().sum(-1)
    return shift, total.log()


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index, reduction):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ignored = torch.zeros_like(targets, dtype=torch.bool)
        if ignore_index is not None:
            ignored = targets == ignore_index
        true = targets.masked_fill(ignored, 0)
        largest, log_sum = log_sum_exp(wide)
        losses = (largest - wide.gather(-1, true[:, None])[:, 0] + log_sum).masked_fill(
            ignored, 0.0
        )
        count = (~ignored).sum()
        ctx.save_for_backward(logits, largest, log_sum, true, ignored, count)
        ctx.reduction = reduction
        if reduction == "none":
            return losses
        total = losses.sum()
        return total / count if reduction == "mean" else total

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, largest, log_sum, true, ignored, count = ctx.saved_tensors
        if ctx.reduction == "mean":
            dloss = dloss / count
        upstream = dloss.expand_as(log_sum).masked_fill(ignored, 0.0)
        p = (logits.to(log_sum.dtype) - largest[:, None] - log_sum[:, None]).exp()
        one = torch.ones_like(p[:, :1])
        dlogits = p.scatter_add(-1, true[:, None], -one) * upstream[:, None]
        return dlogits.to(logits.dtype), None, None, None


def wide(sizes):
    return None if sizes["V"] <= 100 else f"V = {sizes['V']}: up to 100 classes are quick"


@op.provider("written_out", double_backward=False, dtypes=(torch.float32,), supports=wide)
def candidate(logits, targets, ignore_index, reduction):
    return CrossEntropy.apply(logits, targets, ignore_index, reduction)


# variants
from functools import partial

from correctness_tests.corpus.variants import right, wrong

constant = partial(wrong, fault="constant", as_reference=True)
missing = partial(wrong, fault="gradient missing", as_reference=True)

VARIANTS = [
    right(),
    missing("gradient_lost", ("return dlogits.to(logits.dtype), None", "return None, None")),
    missing("gradient_zero", ("* upstream[:, None]", "* 0"), result="grad logits"),
    constant(
        "gradient_1_percent_off",
        ("* upstream[:, None]", "* (1.01 * upstream[:, None])"),
        result="grad logits",
    ),
    constant(
        "loss_1_percent_off", ("losses = (largest", "losses = 1.01 * (largest"), result="loss"
    ),
    # The gradient p - 1 of the true class has a rounded p: nothing is left where p is near 1.
    wrong(
        "probabilities_in_bf16",
        ("log_sum[:, None]).exp()", "log_sum[:, None]).exp().bfloat16().to(log_sum.dtype)"),
        fault="accumulation",
        result="grad logits",
        as_reference=True,
    ),
    constant(
        "mean_counts_ignored_targets",
        ("(~ignored).sum()", "ignored.new_ones(()) * targets.numel()"),
        result="loss",
    ),
    # Ignored tokens have the gradients of class 0.
    constant(
        "ignored_targets_keep_a_gradient",
        ("expand_as(log_sum).masked_fill(ignored, 0.0)", "expand_as(log_sum)"),
    ),
    constant(
        "sum_has_the_gradient_of_the_mean", ('ctx.reduction == "mean"', 'ctx.reduction != "none"')
    ),
    constant(
        "one_upstream_gradient_for_all_tokens",
        ("dloss.expand_as(log_sum)", "dloss.reshape(-1)[:1].expand_as(log_sum)"),
    ),
    wrong(
        "rescaling_clamped",
        ("rescale = (before - shift).exp()", "rescale = (before - shift).clamp_min(-2.0).exp()"),
        fault="overflow",
    ),
]
