"""Rows times twice their number, by a custom op of torch that puts all rows below each other."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_doubled_rows",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=3, D=7), Case(N=5, D=16)],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(x):
    return 2 * len(x) * x


@torch.library.custom_op(
    "corpus_doubled_rows::repeated", mutates_args=(), schema="(Tensor x) -> Tensor"
)
def repeated(x):
    return x.repeat(2, 1)


@repeated.register_fake
def repeated_fake(x):
    return x.new_empty(2 * x.shape[0], x.shape[1])


@op.provider("custom_op")
def candidate(x):
    both = repeated(x)
    return both[: len(x)] * len(both)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "dtype_of_the_fake",
        ("2 * x.shape[0], x.shape[1])", "2 * x.shape[0], x.shape[1], dtype=torch.float32)"),
        fault="framework",
        result="repeated",
    ),
    wrong(
        "size_of_the_fake",
        ("x.new_empty(2 * x.shape[0], x.shape[1])", "x.new_empty(6, x.shape[1])"),
        fault="framework",
    ),
]
