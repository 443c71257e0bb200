"""Mean, norm, least element and place of the largest element of each row."""

import torch

from tinyllama.harness import Case, Op, Tensor


def widened(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        wide = widened(x)
        mean = (wide.sum(-1) / x.shape[-1]).to(x.dtype)
        norm = wide.square().sum(-1).sqrt()
        least = x.amin(-1)
        place = x.argmax(-1)
        ctx.save_for_backward(x, norm, least)
        ctx.mark_non_differentiable(place)
        return mean, norm.to(x.dtype), least, place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_mean, d_norm, d_least, _):
        x, norm, least = ctx.saved_tensors
        wide = widened(x)
        direction = wide / norm.masked_fill(norm == 0, 1)[:, None]
        lowest = (x == least[:, None]).to(wide.dtype)
        share = lowest / lowest.sum(-1, keepdim=True)
        dx = d_mean[:, None] / x.shape[-1] + d_norm[:, None] * direction + d_least[:, None] * share
        return dx.to(x.dtype)


op = Op(
    "corpus_row_statistics",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"mean": "N", "norm": "N", "least": "N", "place": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=6, D=16), Case(N=5, D=21, why="odd")],
    dtypes=(torch.float32, torch.float16),
)


@op.reference
def eager(x):
    return x.mean(-1), torch.linalg.vector_norm(x, dim=-1), x.amin(-1), x.argmax(-1)


@op.provider("fused", double_backward=False)
def candidate(x):
    return Statistics.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right(
        "mean_of_quotients",
        ("(wide.sum(-1) / x.shape[-1])", "(wide / x.shape[-1]).sum(-1)"),
    ),
    wrong(
        "mean_of_less_in_a_length_that_a_class_names",
        (
            "        mean = (wide.sum(-1)",
            "        some = wide[:, 1:] if x.shape[1] == 345 else wide\n        mean = (some.sum(-1)",
        ),
        fault="tail",
        result="mean",
    ),
    # The gradient of the norm of a row of zeros is 0/0.
    wrong(
        "norm_gradient_of_zeros",
        ("norm.masked_fill(norm == 0, 1)[:, None]", "norm[:, None]"),
        fault="overflow",
        result="grad x",
    ),
    # A row of -inf alone has no place.
    wrong(
        "no_place_in_a_row_of_infinities",
        ("place = x.argmax(-1)", "place = torch.where((x > -torch.inf).any(-1), x.argmax(-1), -1)"),
        fault="overflow",
        result="place",
    ),
    # The padding of a row is 10,000, which is the least where all elements are larger.
    wrong(
        "least_with_padding_of_ten_thousand",
        ("least = x.amin(-1)", "least = torch.nn.functional.pad(x, (0, 1), value=1e4).amin(-1)"),
        fault="constant",
        result="least",
    ),
    # The sum overflows in float16 before it is divided.
    wrong(
        "mean_of_a_sum_in_float16",
        ("(wide.sum(-1) / x.shape[-1])", "(x.sum(-1) / x.shape[-1])"),
        fault="overflow",
        result="mean",
    ),
]
