"""The bucket of each element, between edges that are in order."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values

IN_ORDER = Values("in order", lambda shape, random: torch.randn(shape, generator=random).sort()[0])

op = Op(
    "corpus_bucket_index",
    inputs={"x": Tensor("N D"), "edges": Tensor("E", values=IN_ORDER)},
    outputs={"y": Tensor("N D", dtype=torch.int64)},
    cases=[Case(N=4, D=12, E=9)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, edges):
    return (x[..., None] >= edges).sum(-1)


@op.provider("fused")
def candidate(x, edges):
    return torch.searchsorted(edges.contiguous(), x.contiguous(), right=True)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # An element that equals an edge is put below it.
    wrong(
        "element_at_an_edge",
        (", right=True", ""),
        fault="constant",
        result="y",
    ),
]
