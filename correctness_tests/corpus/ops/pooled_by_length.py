"""The first elements of each row, weighted by a softmax; a length a row says how many."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


def lengths(shape, generator):
    return torch.randint(5, 8, shape, generator=generator)


op = Op(
    "corpus_pooled_by_length",
    inputs={
        "x": Tensor("N D"),
        "v": Tensor("N D"),
        "length": Tensor("N", dtype=torch.int64, values=Values("lengths", lengths)),
    },
    outputs={"y": "N"},
    cases=[Case(N=4, D=8), Case(N=3, D=9)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, v, length):
    keep = torch.arange(x.shape[1]) < length[:, None]
    weights = torch.softmax(x.masked_fill(~keep, -torch.inf), 1)
    return (weights * v.masked_fill(~keep, 0)).sum(1)


@op.provider("exponentials")
def candidate(x, v, length):
    padding = torch.arange(x.shape[1], device=x.device) >= length[:, None]
    scores = x.masked_fill(padding, -torch.inf)
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    values = v.masked_fill(padding, 0)
    return (weights * values).sum(1) / weights.sum(1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A weight of zero times an infinity of the padding is a NaN.
    wrong(
        "values_of_padding",
        ("values = v.masked_fill(padding, 0)", "values = v"),
        fault="tail",
        result="y",
    ),
]
