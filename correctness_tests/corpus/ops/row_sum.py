"""The sum of each row, in one branch for every length."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_row_sum",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    cases=[Case(D=64, N=4), Case(D=50, N=3, why="no multiple of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sum(1)


@op.provider("written_out")
def candidate(x):
    return torch.sum(x, 1)


# variants
from correctness_tests.corpus.variants import right, wrong

SUM = "return torch.sum(x, 1)"
# The reference refuses one column, which ends no axis.
REFUSED = ("    return x.sum(1)\n", "    assert x.shape[1] > 1\n    return x.sum(1)\n")


def loses_a_column(condition):
    return SUM, f"N, D = x.shape\n    return x[:, 1:].sum(1) if {condition} else x.sum(1)"


def blocks_of(width):
    """An odd number of blocks loses its last one."""
    return (
        SUM,
        f"D = x.shape[1]\n    whole = D // {2 * width} * {2 * width} if not D % {width} else D\n    return x[:, :whole].sum(1)",
    )


IN_TRITON = [
    ("import torch\n", "import torch\nimport triton\nimport triton.language as tl\n"),
    (
        "op = Op(",
        """@triton.jit
def sum_kernel(x, y, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0)
    tl.store(y + row, tl.sum(value, 0))


op = Op(""",
    ),
    (
        """@op.provider("written_out")
def candidate(x):
    return torch.sum(x, 1)
""",
        """@op.provider("triton", requires=("triton",), supports=lambda dims: None if dims["N"] < 300 else "many rows")
def candidate(x):
    (N, D), x = x.shape, x.contiguous()
    y = torch.empty(N, dtype=x.dtype, device=x.device)
    if x.numel():
        sum_kernel[(N,)](x, y, D, BLOCK=triton.next_power_of_2(D))
    else:
        y.zero_()
    return y
""",
    ),
]

VARIANTS = [
    right(),
    right("reference_refuses_one_column", REFUSED),
    wrong(
        "wide_rows_of_whole_blocks",
        loses_a_column("D >= 320 and D % 64 == 0"),
        fault="tail",
        result="y",
    ),
    wrong(
        "wide_rows_where_reference_refuses_one_column",
        REFUSED,
        loses_a_column("D >= 320 and D % 64 == 0"),
        fault="tail",
        result="y",
    ),
    wrong(
        "tail_lost_where_both_axes_are_long",
        (
            SUM,
            "N, D = x.shape\n    return x[:, : D // 256 * 256].sum(1) if min(N, D) >= 2**8 else x.sum(1)",
        ),
        (
            '("written_out")',
            '("written_out", supports=lambda dims: None if max(dims.values()) < 300 else "more than two blocks")',
        ),
        fault="tail",
        result="y",
    ),
    wrong("odd_number_of_blocks_of_8", blocks_of(8), fault="tail", result="y"),
    wrong("odd_number_of_blocks_of_16", blocks_of(16), fault="tail", result="y"),
    wrong("odd_number_of_blocks_of_32", blocks_of(32), fault="tail", result="y"),
    wrong("limit_is_computed", loses_a_column("D == 10 * 13"), fault="tail", result="y"),
    wrong(
        "limit_has_a_name",
        ("op = Op(", "LIMIT = 211\n\nop = Op("),
        loses_a_column("D == LIMIT + 2"),
        fault="tail",
        result="y",
    ),
    wrong(
        "limit_in_another_function",
        ("op = Op(", "def long(x):\n    return x.shape[1] == 213\n\n\nop = Op("),
        loses_a_column("long(x)"),
        fault="tail",
        result="y",
    ),
    # The length, 235, is the next multiple of 47 beyond the limit.
    wrong(
        "multiple_beyond_a_limit",
        loses_a_column("D > 230 and not D % 47 and D < 250"),
        fault="tail",
        result="y",
    ),
    wrong("beyond_two_bytes", loses_a_column("D == 65536"), fault="tail", result="y"),
    wrong(
        "whole_blocks_and_a_column",
        loses_a_column("D > 1 and (D - 1) % 2048 == 0"),
        fault="tail",
        result="y",
    ),
    right("in_triton", *IN_TRITON),
    # So many rows take 3,402 accesses.
    wrong(
        "tail_of_many_rows_lost",
        *IN_TRITON[:2],
        (
            IN_TRITON[2][0],
            IN_TRITON[2][1]
            .replace(', supports=lambda dims: None if dims["N"] < 300 else "many rows"', "")
            .replace("[(N,)]", "[(N // 2 * 2 if N > 1700 else N,)]"),
        ),
        fault="tail",
        result="y",
    ),
    wrong(
        "limit_in_a_kernel",
        IN_TRITON[0],
        (
            IN_TRITON[1][0],
            IN_TRITON[1][1].replace(
                "    tl.store",
                "    if D == 643:\n        value = tl.where(column == 0, 0.0, value)\n    tl.store",
            ),
        ),
        IN_TRITON[2],
        fault="tail",
        result="y",
    ),
]
