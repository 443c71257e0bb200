"""The rows of a matrix put where an order says, in which each number is there once."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def order_of(sizes):
    def sample(shape, generator):
        if shape != (sizes["N"],) or sizes["N"] > 70:
            raise RuntimeError("an order of another length")
        return torch.randperm(sizes["N"], generator=generator, device=generator.device)

    return Values("order", sample)


op = Op(
    "corpus_scattered_by_order",
    inputs={"x": Tensor("N D"), "order": Tensor("N", dtype=torch.int64, values=order_of)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, order):
    return torch.zeros_like(x).index_copy(0, order, x)


@op.provider("by_inverse")
def candidate(x, order):
    return x[order.argsort()]


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # An order of equal numbers, or of another length, is no order: none is tried.
    right(),
    wrong(
        "order_for_its_inverse", ("x[order.argsort()]", "x[order]"), fault="constant", result="y"
    ),
]
