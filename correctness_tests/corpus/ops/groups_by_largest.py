"""Groups of each row, divided by their largest magnitude, one program a group, in Triton. Each
declared group fills its block.

After the review of vllm-project/vllm pull request 39641.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def divide_kernel(x, y, W, G, C, BLOCK: tl.constexpr):
    row, group = tl.program_id(0) // G, tl.program_id(0) % G
    place = tl.arange(0, BLOCK)
    column = group * C + place
    value = tl.load(x + row * W + column, mask=place < C, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-10)
    tl.store(y + row * W + column, value / largest, mask=place < C)


op = Op(
    "corpus_groups_by_largest",
    inputs={"x": Tensor("N G C")},
    outputs={"y": "N G C"},
    cases=[Case(N=2, G=3, C=16), Case(N=3, G=2, C=8, why="smaller groups")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x / x.abs().amax(-1, keepdim=True).clamp_min(1e-10)


@op.provider("triton", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    N, G, C = x.shape
    if x.numel():
        divide_kernel[(N * G,)](x, y, G * C, G, C, BLOCK=triton.next_power_of_2(C))
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # The loads end with the row, so that a group may take elements of the next one for its own.
    wrong(
        "maximum_over_the_next_group_too",
        ("mask=place < C, other=0.0", "mask=column < W, other=0.0"),
        fault="tail",
        result="y",
    ),
]
