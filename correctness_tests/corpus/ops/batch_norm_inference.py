"""A matrix normalised by means and variances that are inputs without a gradient."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import constant

op = Op(
    "corpus_batch_norm_inference",
    inputs={
        "x": Tensor("N D", grad=True),
        "mean": Tensor("D"),
        "variance": Tensor("D", values=constant(1.0)),
    },
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, mean, variance):
    return torch.nn.functional.batch_norm(x, mean, variance)


@op.provider("written_out")
def candidate(x, mean, variance):
    return (x - mean) / (variance + 1e-5).sqrt()


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("without_gradients", ("grad=True", "grad=False")),
    wrong(
        "variance_for_its_root", ("(variance + 1e-5).sqrt()", "(variance + 1e-5)"), fault="constant"
    ),
]
