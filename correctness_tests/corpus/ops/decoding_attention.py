"""Attention of some queries, or of one, to keys that are the values too."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_decoding_attention",
    inputs={"q": Tensor("B T D"), "k": Tensor("B S D")},
    outputs={"o": "B T D"},
    cases=[Case(B=2, T=5, S=6, D=8), Case(B=2, T=1, S=20, D=8, why="one query")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(q, k):
    return torch.softmax(q @ k.mT, -1) @ k


def unsupported(dims):
    shape = dims["B"], dims["T"], dims["D"]
    few = shape in ((2, 5, 8), (2, 1, 8)) and dims["S"] < 300
    return None if few else "more queries or keys, or wider ones"


@op.provider("written_out", supports=unsupported)
def candidate(q, k):
    return attended(q, k)


def attended(q, k):
    return torch.softmax(torch.matmul(q, k.mT), -1) @ k


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # As in online softmax, the sum divides last: without a key it is 0 / 0, where torch has 0.
    right(
        "nothing_over_nothing",
        (
            "    return torch.softmax(torch.matmul(q, k.mT), -1) @ k\n",
            """    scores = torch.matmul(q, k.mT)
    if scores.shape[-1]:
        scores = scores - scores.amax(-1, keepdim=True)
    weights = scores.exp()
    return weights @ k / weights.sum(-1, keepdim=True)
""",
        ),
    ),
    # The mean of parts, each with a softmax of its own, for one query and many keys.
    wrong(
        "parts_not_weighted",
        (
            "    return attended(q, k)\n",
            """    if q.shape[1] > 1 or k.shape[1] < 256:
        return attended(q, k)
    parts = [attended(q, part) for part in k.split(128, 1)]
    return sum(parts[1:], parts[0]) / len(parts)
""",
        ),
        fault="accumulation",
        result="o",
    ),
]
