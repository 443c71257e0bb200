"""Elements times two, in blocks of columns."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_doubled_in_blocks",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(D=8, N=5)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return 2 * x


@op.independent("x and x")
def written_out(x):
    y = x + x
    return y


@op.provider("torch")
def library(x):
    y = torch.mul(x, 2)
    return y


@op.provider("blocks")
def candidate(x):
    y = torch.empty_like(x)
    y.copy_(2 * x)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

COPIED = "    y.copy_(2 * x)\n"
LIBRARY, WRITTEN_OUT = "    y = torch.mul(x, 2)\n", "    y = x + x\n"
IN_COLUMNS = "    if x.shape[1] > 4096:\n"
IN_HALF = "    if x.shape[1] > 4096 and x.dtype is torch.float16:\n"
ALONG_BOTH = "    if x.shape == (131, 131):\n"
DTYPES = "dtypes=(torch.float32,)", "dtypes=(torch.float32, torch.float16)"
CASE = "Case(D=8, N=5)", "Case(D=4, N=2)"


def larger(line, there, factor):
    """An edit by which results of a line are too large under a condition."""
    return line, f"{line}{there}        y *= {factor}\n"


def pairs(block):
    """An edit by which two blocks are taken at a time, and the last one alone if it is not full."""
    lines = (
        f"blocks, tail = divmod(x.shape[1], {block})",
        f"end = x.shape[1] if tail or blocks < 2 else blocks // 2 * {2 * block}",
        "y.copy_(2 * x)",
        "y[:, end:] = 0",
    )
    return COPIED, "".join(f"    {line}\n" for line in lines)


VARIANTS = [
    right(),
    # torch's provider is about as wrong there, so the place tells nothing.
    right(
        "as_torch_in_many_columns",
        larger(COPIED, IN_COLUMNS, 1.5),
        larger(LIBRARY, IN_COLUMNS, 1.2),
        open="sizes: the last of 16,777,216 elements are wrong",
    ),
    right(
        "as_torch_in_half",
        larger(COPIED, IN_HALF, 1.5),
        larger(LIBRARY, IN_HALF, 1.2),
        DTYPES,
        CASE,
    ),
    right(
        "as_torch_along_both_axes",
        larger(COPIED, ALONG_BOTH, 1.5),
        larger(LIBRARY, ALONG_BOTH, 1.2),
    ),
    right(
        "as_independent_code",
        larger(COPIED, IN_COLUMNS, 1.5),
        larger(WRITTEN_OUT, IN_COLUMNS, 1.2),
        open="sizes: the last of 16,777,216 elements are wrong",
    ),
    # torch's provider is right there.
    wrong("too_large_in_many_columns", larger(COPIED, IN_COLUMNS, 1.5), fault="tail", result="y"),
    wrong(
        "too_large_in_half", larger(COPIED, IN_HALF, 1.5), DTYPES, CASE, fault="tail", result="y"
    ),
    wrong("too_large_along_both_axes", larger(COPIED, ALONG_BOTH, 1.5), fault="tail", result="y"),
    # torch's provider is wrong there, too, but by far less.
    wrong(
        "far_more_than_torch_in_many_columns",
        larger(COPIED, IN_COLUMNS, 4.0),
        larger(LIBRARY, IN_COLUMNS, 1.2),
        fault="tail",
        result="y",
    ),
    wrong(
        "far_more_than_torch_in_half",
        larger(COPIED, IN_HALF, 4.0),
        larger(LIBRARY, IN_HALF, 1.2),
        DTYPES,
        CASE,
        fault="tail",
        result="y",
    ),
    wrong(
        "far_more_than_torch_along_both_axes",
        larger(COPIED, ALONG_BOTH, 4.0),
        larger(LIBRARY, ALONG_BOTH, 1.2),
        fault="tail",
        result="y",
    ),
    # No other implementation says that it may be so.
    wrong(
        "too_large_without_other_implementations",
        larger(COPIED, IN_COLUMNS, 1.5),
        ('@op.provider("torch")\n', ""),
        ('@op.independent("x and x")\n', ""),
        fault="tail",
        result="y",
    ),
    # An odd number of whole blocks loses the last one.
    *(
        wrong(f"last_of_odd_blocks_of_{block}_lost", pairs(block), fault="tail", result="y")
        for block in (64, 128, 256, 512, 1024)
    ),
    # Small numbers are taken for zeros, which need not be doubled.
    wrong(
        "tiny_numbers_not_doubled",
        (COPIED, "    y.copy_(torch.where(x.abs() < 1e-7, x, 2 * x))\n"),
        fault="overflow",
        rank="warning",
        result="y",
    ),
]
