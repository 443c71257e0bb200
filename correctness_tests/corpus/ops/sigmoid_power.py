"""A power of a sigmoid, as in a focal loss."""

import torch

from tinyllama.harness import Case, Op, Tensor


class SigmoidPower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma):
        ctx.save_for_backward(x)
        ctx.gamma = gamma
        return torch.sigmoid(-x) ** gamma

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        q = torch.sigmoid(-x)
        slope = ctx.gamma * q**ctx.gamma
        return -dy * slope * torch.sigmoid(x), None


op = Op(
    "corpus_sigmoid_power",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"gamma": 2.0},
    cases=[Case(N=8, D=32)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, gamma):
    return torch.sigmoid(-x) ** gamma


@op.provider("fused", double_backward=False)
def candidate(x, gamma):
    return SigmoidPower.apply(x, gamma)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # With gamma = 0 and a sigmoid of zero the gradient is zero times infinity.
    wrong(
        "gradient_of_a_power_of_zero",
        ("ctx.gamma * q**ctx.gamma", "ctx.gamma * q ** (ctx.gamma - 1) * q"),
        fault="overflow",
        result="grad x",
    ),
]
