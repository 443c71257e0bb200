"""The positive elements of a matrix times a gain, in several dtypes, without a kernel."""

import torch

from tinyllama.harness import Case, Op, Tensor


class GainedPositivePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return torch.where(x > 0, x * gain, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, gain = ctx.saved_tensors
        dx = torch.where(x > 0, dy * gain, 0)
        return dx, (dy.float() * x.clamp(min=0).float()).sum(0).to(gain.dtype)


op = Op(
    "corpus_gained_positive_part",
    inputs={"x": Tensor("N D", grad=True), "gain": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=7, D=50), Case(N=2, D=3)],
)


@op.reference
def eager(x, gain):
    return torch.where(x > 0, x * gain, 0)


@op.provider("written_out", double_backward=False)
def candidate(x, gain):
    return GainedPositivePart.apply(x, gain)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A zero of the result is no excuse: other elements of it are not zero.
    wrong(
        "leak_in_wide_rows",
        (
            "return torch.where(x > 0, x * gain, 0)\n\n    @staticmethod",
            "return torch.where(x > 0, x * gain, 9e-4 * x * (x.shape[1] > 64))\n\n    @staticmethod",
        ),
        fault="constant",
    ),
    wrong(
        "large_upstream_reaches_dead_elements",
        (
            "dx = torch.where(x > 0, dy * gain, 0)",
            "dx = torch.where(x > 0, dy * gain, 2.0 * (dy.abs() > 500))",
        ),
        fault="constant",
    ),
    wrong(
        "a_column_of_wide_rows_is_zero_in_bfloat16",
        (
            "        return torch.where(x > 0, x * gain, 0)\n\n    @staticmethod",
            "        wrong = x.dtype == torch.bfloat16 and x.shape[1] > 64\n        seen = torch.arange(x.shape[1], device=x.device) != (64 if wrong else -1)\n        return torch.where((x > 0) & seen, x * gain, 0)\n\n    @staticmethod",
        ),
        fault="tail",
    ),
    wrong(
        "nan_in_a_backward_under_autocast",
        (
            "        return dx, (dy",
            "        if torch.is_autocast_enabled(dy.device.type):\n            dx = dx * torch.nan\n        return dx, (dy",
        ),
        fault="framework",
    ),
    wrong(
        "nan_for_infinity_without_gradients",
        (
            'Tensor("N D", grad=True), "gain": Tensor("D", grad=True)',
            'Tensor("N D"), "gain": Tensor("D")',
        ),
        (
            "    return GainedPositivePart.apply(x, gain)",
            "    return torch.where(x.isinf(), torch.nan, GainedPositivePart.apply(x, gain))",
        ),
        fault="overflow",
    ),
]
