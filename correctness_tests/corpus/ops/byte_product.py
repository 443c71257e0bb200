"""Products of matrices of bytes, exact in integers."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values

BYTES = Values("bytes", lambda shape, random: torch.randint(-128, 128, shape, generator=random))

op = Op(
    "corpus_byte_product",
    inputs={
        "a": Tensor("M K", dtype=torch.int8, values=BYTES),
        "b": Tensor("K N", dtype=torch.int8, values=BYTES),
    },
    outputs={"y": Tensor("M N", dtype=torch.int64)},
    cases=[Case(K=8, M=3, N=2)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(a, b):
    return a.long() @ b.long()


@op.provider("fused")
def candidate(a, b):
    return (a.double() @ b.double()).long()


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Sums beyond 2^24 are rounded in float32.
    wrong(
        "sums_in_float32",
        ("(a.double() @ b.double())", "(a.float() @ b.float())"),
        fault="accumulation",
        result="y",
    ),
]
