"""The columns of each row, moved to the right by an offset; zeros come from the left."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_moved_columns",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"offset": 1},
    cases=[Case(N=5, D=8), Case(N=3, D=50, why="ragged")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, offset):
    if offset < 0:
        raise ValueError(f"offset {offset}: use 0 or more")
    return torch.nn.functional.pad(x, (offset, 0))[:, : x.shape[1]]


@op.provider("concatenated")
def candidate(x, offset):
    if offset < 0:
        raise ValueError(f"offset {offset}: use 0 or more")
    columns = min(offset, x.shape[1])
    return torch.cat((x.new_zeros(len(x), columns), x[:, : x.shape[1] - columns]), 1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Not every whole number need be an offset that a kernel has.
    right(
        "other_offsets_refused",
        (
            "columns = min(offset, x.shape[1])",
            'if offset != 1:\n        raise ValueError(f"offset {offset}: use 1")\n'
            "    columns = min(offset, x.shape[1])",
        ),
    ),
    wrong(
        "larger_offsets_taken_for_one",
        ("columns = min(offset, x.shape[1])", "columns = min(offset, 1)"),
        fault="constant",
        result="y",
    ),
]
