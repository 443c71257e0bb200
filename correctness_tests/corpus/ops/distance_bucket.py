"""The bucket of a signed distance, in eights rounded down, in Triton.

After triton-lang/triton issue 619: ``//`` rounds toward zero in Triton, and down in Python.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values


@triton.jit
def bucket_kernel(distance, y, N, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(distance + at, mask=at < N, other=0)
    bucket = value // WIDTH
    bucket = tl.where(bucket * WIDTH > value, bucket - 1, bucket)
    tl.store(y + at, bucket, mask=at < N)


def signed(shape, generator):
    return torch.randint(-50, 50, shape, generator=generator, device=generator.device)


op = Op(
    "corpus_distance_bucket",
    inputs={"distance": Tensor("N", dtype=torch.int64, values=Values("signed", signed, -50))},
    outputs={"y": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=64), Case(N=37, why="part of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(distance):
    return torch.div(distance, 8, rounding_mode="floor")


@op.provider("triton", requires=("triton",))
def candidate(distance):
    distance = distance.contiguous()
    y = torch.empty_like(distance)
    if N := len(y):
        bucket_kernel[(triton.cdiv(N, 32),)](distance, y, N, WIDTH=8, BLOCK=32)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "negative_distance_rounded_toward_zero",
        ("    bucket = tl.where(bucket * WIDTH > value, bucket - 1, bucket)\n", ""),
        fault="constant",
        result="y",
    ),
]
