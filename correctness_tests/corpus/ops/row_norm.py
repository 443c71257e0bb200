"""The p-norm of each row, with p as a parameter."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_row_norm",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N"},
    params={"p": 2.0},
    cases=[Case(N=4, D=64), Case(N=3, D=50, why="no multiple of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, p):
    return torch.linalg.vector_norm(x, p, 1)


@op.provider("written_out")
def candidate(x, p):
    return torch.linalg.vector_norm(x, p, 1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "cubes_keep_their_sign",
        (
            '    return torch.linalg.vector_norm(x, p, 1)\n\n\n@op.provider("written_out")\ndef candidate(x, p):\n',
            '    return torch.linalg.vector_norm(x, p, 1)\n\n\nCUBE = 3.0\n\n\n@op.provider("written_out")\ndef candidate(x, p):\n'
            "    if p == CUBE:\n        return x.pow(3).sum(1).abs() ** (1 / 3)\n",
        ),
        fault="constant",
        result="p = 3: y",
    ),
]
