"""A softmax of products over chunks of keys, whose scores are rounded otherwise than at once."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_attention_in_chunks",
    inputs={"q": Tensor("T D", grad=True), "k": Tensor("S D", grad=True), "v": Tensor("S E")},
    outputs={"o": "T E"},
    cases=[Case(T=6, S=20, D=8, E=4), Case(T=5, S=9, D=5, E=7, why="a last chunk of one")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(q, k, v):
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


def unsupported(dims):
    return None if max(dims.values()) < 300 else "long sequences, or wide ones"


@op.provider("chunks", supports=unsupported)
def candidate(q, k, v):
    scale = q.shape[-1] ** -0.5
    highest, total = q.new_full((len(q), 1), -float("inf")), q.new_zeros(len(q), 1)
    o = q.new_zeros(len(q), v.shape[1])
    for keys, values in zip(k.split(4), v.split(4), strict=True):
        scores = q @ keys.T * scale
        largest = torch.maximum(highest, scores.detach().amax(-1, keepdim=True))
        p, before = (scores - largest).exp(), (highest - largest).exp()
        total, o = total * before + p.sum(-1, keepdim=True), o * before + p @ values
        highest = largest
    return o / total


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # Far apart, scores are products of two inputs that are so many times as large.
    right(open="accused by sizes"),
    wrong("scale_too_large", ("scale = q", "scale = 1.001 * q"), fault="constant"),
    wrong(
        "earlier_chunks_not_rescaled",
        ("o * before + p @ values", "o + p @ values"),
        fault="accumulation",
        result="o",
    ),
]
