"""Twice a matrix, in tiles of 64 by 64 that several steps write, with a gradient."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def kernel(x, y, N, F, STEP: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1)
    rows = m * 64 + tl.arange(0, 64)
    for first in range(0, 64, STEP):
        columns = n * 64 + first + tl.arange(0, STEP)
        inside = (rows < N)[:, None] & (columns < F)[None, :]
        at = rows[:, None].to(tl.int64) * F + columns[None, :]
        factor = 2.0
        tl.store(y + at, tl.load(x + at, mask=inside, other=0.0) * factor, mask=inside)


def doubled(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.shape[0], 64), triton.cdiv(x.shape[1], 64))
        kernel[grid](x, y, *x.shape, STEP=16)
    return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return doubled(dy)


op = Op(
    "corpus_doubled_tiles",
    inputs={"x": Tensor("N F", grad=True)},
    outputs={"y": "N F"},
    cases=[Case(N=7, F=50), Case(N=130, F=33), Case(N=3, F=1025)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return 2 * x


@op.provider("tiles", requires=("triton",), double_backward=False)
def candidate(x):
    return Doubled.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Seen only where both axes are longer than a tile.
    wrong(
        "inner_tiles_tripled",
        ("        factor = 2.0\n", "        factor = tl.where((m > 0) & (n > 0), 3.0, 2.0)\n"),
        fault="tail",
    ),
    # Many loads and stores: the check of upstream gradients must not be spared for that.
    wrong(
        "upstream_is_clamped",
        ("cases=[Case(N=7, F=50)", "cases=[Case(N=2000, F=1000)"),
        ("        return doubled(dy)", "        return doubled(dy.clamp(-100, 100))"),
        fault="constant",
        slow="thousands of loads and stores are interpreted",
    ),
]
