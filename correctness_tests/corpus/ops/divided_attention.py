"""Attention that is divided by the sum of its weights last; one query has a single key."""

import torch

from tinyllama.harness import Case, Op, Tensor


def masked_scores(q, k):
    """The query at position 50 sees the first key alone, so that its gradient cancels to zero."""
    queries = torch.arange(len(q), device=q.device)
    keys = torch.arange(len(k), device=q.device)
    return (q @ k.T / q.shape[1] ** 0.5).masked_fill(
        (queries == 50)[:, None] & (keys > 0), -torch.inf
    )


op = Op(
    "corpus_divided_attention",
    inputs={
        "q": Tensor("N D", grad=True),
        "k": Tensor("M D", grad=True),
        "v": Tensor("M D", grad=True),
    },
    outputs={"y": "N D"},
    cases=[Case(N=5, M=6, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(q, k, v):
    return torch.softmax(masked_scores(q, k), 1) @ v


@op.magnitude
def terms(q, k, v, upstream):
    """The root of the sum of the squares of the terms of the gradients of q and k, which cancel."""
    scale = q.shape[1] ** -0.5
    p = torch.softmax(masked_scores(q, k), 1)
    squares = upstream["y"].square() @ v.square().T
    squares = p.square() * (squares + (p.square() * squares).sum(1, keepdim=True))
    return {
        "grad q": scale * (squares @ k.square()).sqrt(),
        "grad k": scale * (squares.T @ q.square()).sqrt(),
    }


@op.provider("exponentials")
def candidate(q, k, v):
    scores = masked_scores(q, k)
    weights = (scores - scores.detach().amax(1, keepdim=True)).exp()
    return weights @ v / weights.sum(1, keepdim=True)


# variants
from correctness_tests.corpus.variants import right

VARIANTS = [
    right(),
    # Autocast may not accuse it either; of a row that is zero nothing else is declared.
    right(
        "magnitudes_not_declared",
        ("@op.magnitude\n", ""),
        open="sizes and special values, in the gradient of q: they ask for @op.magnitude",
    ),
]
