"""A product with a weight, in the dtype of autocast, given in float32."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_product_in_float32",
    inputs={"x": Tensor("N D", grad=True), "w": Tensor("F D", grad=True)},
    outputs={"y": Tensor("N F", dtype=torch.float32)},
    cases=[Case(N=5, D=8, F=6)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, w):
    return (x @ w.T).to(torch.promote_types(x.dtype, torch.float32))


@op.provider("matmul")
def candidate(x, w):
    return torch.matmul(x, w.T).float()


# variants
from correctness_tests.corpus.variants import right, wrong

CALL = "    return torch.matmul(x, w.T).float()\n"

VARIANTS = [
    right(),
    wrong(
        "autocast_ignored",
        (CALL, '    with torch.autocast("cpu", enabled=False):\n    ' + CALL),
        fault="framework",
        rank="warning",
        result="autocast",
    ),
]
