"""The largest element of each row, and its index."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_row_maximum",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"value": "N", "index": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=6, D=64), Case(N=7, D=33, why="ragged")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return tuple(x.max(-1))


@op.provider("manual", keep=("x", "index"))
class Manual:
    @staticmethod
    def forward(x):
        value, index = x.max(-1)
        return value, index

    @staticmethod
    def backward(grads, kept, saved, needs):
        dx = torch.zeros(kept["x"].shape, dtype=kept["x"].dtype, device=kept["x"].device)
        return {"x": dx.scatter_(-1, kept["index"][:, None], grads[0][:, None])}


# variants
from correctness_tests.corpus.variants import right, wrong

RETURN = "return value, index\n"
# A candidate that is a function of torch, with its gradient.
FUNCTION = (
    """@op.provider("manual", keep=("x", "index"))
class Manual:
    @staticmethod
    def forward(x):
        value, index = x.max(-1)
        return value, index

    @staticmethod
    def backward(grads, kept, saved, needs):
        dx = torch.zeros(kept["x"].shape, dtype=kept["x"].dtype, device=kept["x"].device)
        return {"x": dx.scatter_(-1, kept["index"][:, None], grads[0][:, None])}
""",
    """@op.provider("written_out")
def candidate(x):
    value, index = x.max(-1)
    return value, INDEX
""",
)


def returning(index):
    return FUNCTION[0], FUNCTION[1].replace("INDEX", index)


VARIANTS = [
    right(),
    right("function_of_torch", returning("index")),
    wrong(
        "index_of_last_row_off_by_one",
        returning("index + (torch.arange(len(x), device=x.device) == 6)"),
        fault="tail",
        result="index: ",
    ),
    wrong("index_all_zero", returning("0 * index"), fault="constant", result="index: "),
    # A NaN is the largest element in the reference.
    wrong(
        "index_ignores_nan",
        returning('x.nan_to_num(-float("inf")).argmax(-1)'),
        fault="overflow",
        rank="warning",
        result="x: nan",
    ),
]
