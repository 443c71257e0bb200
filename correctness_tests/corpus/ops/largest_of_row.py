"""The largest element of each row and the first index of it, by blocks of 128 columns."""

import torch

from tinyllama.harness import Case, Op, Tensor

BLOCK = 128

op = Op(
    "corpus_largest_of_row",
    inputs={"x": Tensor("N D")},
    outputs={"largest": "N", "index": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=8, D=64), Case(N=3, D=50)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.amax(1), x.argmax(1)


@op.provider("blocks")
def candidate(x):
    largest, index = x[:, :BLOCK].max(1)
    for start in range(BLOCK, x.shape[1], BLOCK):
        value, place = x[:, start : start + BLOCK].max(1)
        larger = value > largest
        largest = torch.where(value.isnan(), value, torch.maximum(largest, value))
        index = torch.where(larger, start + place, index)
    return largest, index


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Later blocks are padded with zeros, which are larger than negative elements.
    wrong(
        "later_blocks_padded_with_zeros",
        ("torch.maximum(largest, value))", "torch.maximum(largest, value.clamp(min=0)))"),
        fault="tail",
        result="largest",
    ),
    # Of equal elements, that of the last block is taken.
    wrong(
        "last_block_of_ties",
        ("larger = value > largest", "larger = value >= largest"),
        fault="constant",
        result="index",
    ),
]
