"""The summed cross-entropy of labels, of which one value is ignored."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import integers

op = Op(
    "corpus_label_loss",
    inputs={
        "logits": Tensor("N V", grad=True),
        "labels": Tensor("N", dtype=torch.int64, values=lambda dims: integers(dims["V"])),
    },
    outputs={"loss": ""},
    params={"ignored": -100},
    cases=[Case(N=5, V=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(logits, labels, ignored):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")


@op.provider("by_rows")
def candidate(logits, labels, ignored):
    unused = labels == ignored
    chosen = logits.gather(-1, labels.masked_fill(unused, 0)[:, None])[:, 0]
    return (logits.logsumexp(-1) - chosen).masked_fill(unused, 0.0).sum()


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Every negative label is ignored, and the parameter is not looked at.
    wrong(
        "negative_labels_ignored",
        ("unused = labels == ignored", "unused = labels < 0"),
        fault="constant",
        result="loss",
    ),
]
