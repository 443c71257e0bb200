"""The largest element of each row; equal ones share its gradient."""

import torch

from tinyllama.harness import Case, Op, Tensor


class RowPeak(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.amax(-1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        largest = (x == y[:, None]).to(dy.dtype)
        share = largest / largest.sum(-1, keepdim=True)
        return share * dy[:, None]


op = Op(
    "corpus_row_peak",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    cases=[Case(D=8, N=5), Case(D=50, N=3, why="ragged")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.amax(-1)


@op.independent("sorted")
def written_out(x):
    return x.sort(-1).values[:, -1]


@op.provider("torch")
def library(x):
    return x.max(-1).values


@op.provider("rows")
def candidate(x):
    return RowPeak.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

PEAK, CALL = "        y = x.amax(-1)\n", "    return RowPeak.apply(x)\n"
VARIANTS = [
    right(),
    # One of equal elements gets all of the gradient, as in torch.
    right("gradient_of_one_of_equals", (CALL, "    return x.max(-1).values + 0\n")),
    # What does not fill a block of 8 columns is filled with zeros.
    wrong(
        "padded_with_zeros",
        (PEAK, "        y = torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).amax(-1)\n"),
        fault="tail",
        result="y",
    ),
    wrong(
        "rows_of_equal_elements_larger_by_one",
        (PEAK, PEAK + "        y = torch.where((x == x[:, :1]).all(-1), y + 1, y)\n"),
        fault="constant",
        result="y",
    ),
    wrong(
        "gradient_of_each_of_equals_in_full",
        ("        share = largest / largest.sum(-1, keepdim=True)\n", "        share = largest\n"),
        fault="overflow",
        rank="warning",
        result="grad x",
    ),
    wrong(
        "nan_lost",
        (
            PEAK,
            '        y = x.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).amax(-1)\n',
        ),
        fault="overflow",
        rank="warning",
        result="y",
    ),
    # An infinity in one row is a NaN in all others.
    wrong(
        "infinity_makes_all_rows_nan",
        (PEAK, PEAK + "        y = y + 0 * x.sum()\n"),
        fault="overflow",
        result="y",
    ),
    # A NaN in one row is one in all others.
    wrong(
        "nan_reaches_all_rows",
        (
            PEAK,
            PEAK
            + '        y = y + 0 * x.nan_to_num(nan=float("nan"), posinf=0.0, neginf=0.0).sum()\n',
        ),
        fault="overflow",
        rank="warning",
        result="y",
    ),
    # The last block of 256 columns is left out where it is full.
    wrong(
        "full_last_block_left_out",
        (
            PEAK,
            "        full = x.shape[1] % 256 == 0 and x.shape[1] > 256\n"
            "        y = x[:, :-256].amin(-1) if full else x.amax(-1)\n",
        ),
        fault="tail",
        result="y",
    ),
    # A single row is reduced along the other axis.
    wrong(
        "single_row_reduced_to_its_first_element",
        (PEAK, "        y = x.amax(-1) if len(x) > 1 else x.amax(0)[:1]\n"),
        ("Case(D=8, N=5), Case(D=50, N=3, why", "Case(N=5, D=8), Case(N=3, D=50, why"),
        fault="tail",
        result="y",
    ),
]
