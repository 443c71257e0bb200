"""The rows of a matrix less their mean, divided by their standard deviation."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_standardised_rows",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=32)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@op.provider("written_out", saved={"scale": Tensor("N")}, keep=("y",))
class StandardisedRows:
    @staticmethod
    def forward(x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        scale = (variance + 1e-5).rsqrt()
        return (x - mean) * scale, scale[:, 0]

    @staticmethod
    def backward(grads, kept, saved, needs):
        dy, y = grads[0], kept["y"]
        scale = saved["scale"].view(-1, 1)
        centred = dy - dy.mean(-1, keepdim=True) - y * (dy * y).mean(-1, keepdim=True)
        return {"x": centred * scale}


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A small difference of two large numbers: the mean of the squares, and the square of the mean.
    wrong(
        "variance_as_a_difference_of_squares",
        (
            "(x - mean).square().mean(-1, keepdim=True)",
            "x.square().mean(-1, keepdim=True) - mean.square()",
        ),
        fault="accumulation",
        result="y",
    ),
    # The compiler reads the memory of what is saved by the declared shape.
    wrong(
        "saved_in_another_shape_than_declared",
        ("scale[:, 0]", "scale"),
        fault="framework",
        rank="refused",
    ),
]
