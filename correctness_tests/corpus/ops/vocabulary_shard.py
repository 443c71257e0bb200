"""The logit of each row's label in one shard of a vocabulary, and 0 if another shard has it.

After apple/ml-cross-entropy pull request 59: a label of another shard becomes V, the number of
classes, which is also the first column behind the end of the last block.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import integers


@triton.jit
def pick_kernel(x, label, y, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.load(label + row)
    place = tl.where((place >= 0) & (place < V), place, V)
    chosen = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * V + column, mask=column < V, other=-float("inf"))
        chosen += tl.sum(tl.where((column == place) & (column < V), value, 0.0), 0)
    tl.store(y + row, chosen)


op = Op(
    "corpus_vocabulary_shard",
    inputs={
        "x": Tensor("N V"),
        "label": Tensor("N", dtype=torch.int64, values=lambda sizes: integers(2 * sizes["V"])),
    },
    outputs={"y": "N"},
    cases=[Case(N=6, V=16), Case(N=3, V=32, why="two blocks")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, label):
    inside = (label >= 0) & (label < x.shape[1])
    chosen = x.gather(1, torch.where(inside, label, 0)[:, None])[:, 0]
    return torch.where(inside, chosen, torch.zeros_like(chosen))


@op.provider("triton", requires=("triton",))
def candidate(x, label):
    x, label = x.contiguous(), label.contiguous()
    y = torch.empty(len(x), dtype=x.dtype, device=x.device)
    if len(x):
        pick_kernel[(len(x),)](x, label, y, x.shape[1], BLOCK=16)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A label of another shard equals the first padded column, which has -inf. No declared V leaves one.
    wrong(
        "label_of_another_shard_meets_the_padding",
        ("tl.where((column == place) & (column < V), value", "tl.where(column == place, value"),
        fault="tail",
        result="y",
    ),
]
