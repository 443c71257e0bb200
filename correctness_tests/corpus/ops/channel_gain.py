"""A matrix whose columns are multiplied by a weight, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class ChannelGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dy * w
        dw = (dy * x).sum(0)
        return dx, dw


op = Op(
    "corpus_channel_gain",
    inputs={"x": Tensor("N D", grad=True), "w": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=16), Case(N=3, D=7, why="odd sizes")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, w):
    return x * w


@op.provider("derived_by_hand")
def candidate(x, w):
    return ChannelGain.apply(x, w)


# variants
from correctness_tests.corpus.variants import right, wrong

BEFORE_THE_CLASS = "class ChannelGain("
CALL = "    return ChannelGain.apply(x, w)\n"


def after(change):
    """The edit by which each call changes a setting first."""
    return CALL, f"    {change}\n{CALL}"


VARIANTS = [
    right(),
    right("plain_product", (CALL, "    return x * w\n")),
    # The backward pass deletes what other passes have added to .grad of the weight.
    wrong(
        "sum_in_grad_deleted",
        (
            "dw = (dy * x).sum(0)",
            "dw = (dy * x).sum(0)\n        if w.is_leaf:\n            w.grad = None",
        ),
        fault="aliasing",
        result="w",
    ),
    # A backward pass within the backward pass adds to .grad of the weight, beside what it returns.
    wrong(
        "backward_within_backward",
        (
            "        dx = dy * w\n",
            """\
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (leaf * w).backward(dy)
        dx = leaf.grad
""",
        ),
        fault="aliasing",
        result="w",
    ),
    # What is saved for backward is found by the weight, which two layers may share.
    wrong(
        "saved_by_weight",
        (BEFORE_THE_CLASS, f"ROWS = {{}}\n\n\n{BEFORE_THE_CLASS}"),
        (
            "        ctx.save_for_backward(x, w)\n",
            "        ctx.save_for_backward(x, w)\n        ctx.key = id(w)\n        ROWS[ctx.key] = x\n",
        ),
        ("(dy * x).sum(0)", "(dy * ROWS[ctx.key]).sum(0)"),
        fault="stale state",
        result="w",
    ),
    # An argument that is refused leaves gradients switched off.
    wrong(
        "gradients_off_after_an_error",
        (
            CALL,
            f"""\
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    if x.shape[-1] != w.shape[-1]:
        raise ValueError("x and w have other widths")
    torch.set_grad_enabled(before)
{CALL}""",
        ),
        fault="stale state",
        rank="unsafe",
    ),
    # A weight that is too short is padded with zeros, where the reference raises an error.
    wrong(
        "short_weight_padded",
        (
            CALL,
            f"""\
    if x.shape[-1] < w.shape[-1]:
        raise ValueError("x is narrower than w")
    w = torch.nn.functional.pad(w, (0, x.shape[-1] - w.shape[-1]))
{CALL}""",
        ),
        fault="layout",
        rank="warning",
    ),
    wrong(
        "benchmarks_of_cudnn_switched_on",
        after("torch.backends.cudnn.benchmark = True"),
        fault="stale state",
        rank="unsafe",
    ),
    wrong(
        "products_in_tf32_switched_on",
        after('torch.set_float32_matmul_precision("high")'),
        fault="stale state",
        rank="unsafe",
    ),
    wrong(
        "deterministic_algorithms_switched_on",
        after("torch.use_deterministic_algorithms(True, warn_only=True)"),
        fault="stale state",
        rank="unsafe",
    ),
]
