"""The mean of a matrix, which is undefined without rows, and the sums of its columns."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_mean_and_sum",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "", "z": "D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum() / x.numel(), x.sum(0)


@op.provider("written_out")
def candidate(x):
    return x.mean(), x.sum(0)


# variants
from correctness_tests.corpus.variants import right, wrong

CALL = "return x.mean(), x.sum(0)"


def without_rows(text):
    return CALL, f"if not len(x):\n        {text}\n    {CALL}"


WIDE = (CALL, "return x.double().mean(), x.double().sum(0)")

VARIANTS = [
    right(),
    right("mean_of_nothing_is_zero", without_rows("return x.sum(), x.sum(0)")),
    wrong(
        "sum_of_nothing_is_one",
        without_rows("return x.sum(), x.sum(0) + 1"),
        fault="empty",
        result="z",
    ),
    wrong(
        "sum_of_nothing_is_nan",
        without_rows("return x.sum(), x.sum(0) + torch.nan"),
        fault="empty",
        result="z",
    ),
    wrong(
        "nothing_refused",
        without_rows('raise ValueError("no rows")'),
        fault="empty",
        rank="refused",
        result="ValueError: no rows",
    ),
    # A refusal of no columns does not hide a wrong sum of no rows.
    wrong(
        "sum_of_nothing_is_one_and_no_columns_refused",
        (
            CALL,
            f"""if not x.shape[1]:
        raise ValueError("no columns")
    if not len(x):
        return x.sum(), x.sum(0) + 1
    {CALL}""",
        ),
        fault="empty",
        result="z",
    ),
    right(
        "outputs_in_float64_declared",
        WIDE,
        (
            '"written_out")',
            '"written_out", output_dtypes={"y": torch.float64, "z": torch.float64})',
        ),
    ),
    wrong("outputs_in_float64", WIDE, fault="framework"),
]
