"""Dropout whose mask is drawn by Triton's random numbers from a seed, again in the backward pass.

With its variant of one program a row after state-spaces/mamba pull request 1023 and Triton's
tutorial on seeded dropout.
"""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def drop_kernel(x, y, seed, p, scale, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    stays = tl.rand(tl.load(seed), place.to(tl.int32)) >= p
    tl.store(y + place, tl.where(stays, value * scale, 0.0), mask=inside)


def drop(x, seed, p):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    if n := x.numel():
        drop_kernel[(triton.cdiv(n, 256),)](x, y, seed, p, scale, n, BLOCK=256)
    return y


def seed_tensor(seed, device):
    return torch.full((1,), seed, dtype=torch.int64, device=device)


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p is {p}: use a probability")
        ctx.p, ctx.seed = p, seed_tensor(seed, x.device)
        return drop(x, ctx.seed, p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return drop(dy, ctx.seed, ctx.p), None, None


def uniform(seed, n, device):
    """The numbers of tl.rand at places below n: the first word of Philox 4x32-10."""
    word = 0xFFFFFFFF
    c0 = torch.arange(n, dtype=torch.int64, device=device) & word
    c1, c2, c3 = (torch.zeros_like(c0) for _ in range(3))
    k0, k1 = seed & word, (seed >> 32) & word
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0 = ((b >> 32) & word) ^ c1 ^ k0
        c2 = ((a >> 32) & word) ^ c3 ^ k1
        c1, c3 = b & word, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    signed = torch.where(c0 >= 2**31, c0 - 2**32, c0)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * 4.6566127342e-10


op = Op(
    "corpus_philox_dropout",
    inputs={"x": Tensor("N D", grad=True)},
    params={"p": 0.25, "seed": 7},
    outputs={"y": "N D"},
    cases=[
        Case(N=4, D=16),
        Case(N=5, D=101, why="several blocks, the last of them ragged"),
        Case(N=4, D=16, params={"seed": 1234}, why="another seed"),
    ],
)


@op.reference
def eager(x, p, seed):
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p is {p}: use a probability")
    wide = torch.promote_types(x.dtype, torch.float32)
    stays = (uniform(seed, x.numel(), x.device) >= p).reshape(x.shape)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return torch.where(stays, x.to(wide) * scale, 0.0).to(x.dtype)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, p, seed):
    return Dropout.apply(x, p, seed)


# variants
from correctness_tests.corpus.variants import right, wrong

PLACE = """\
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
"""
BY_ROWS = (
    (
        PLACE,
        """\
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * n + column
    inside = column < n
""",
    ),
    (
        "drop_kernel[(triton.cdiv(n, 256),)](x, y, seed, p, scale, n, BLOCK=256)",
        "N, D = x.shape\n"
        "        drop_kernel[(N,)](x, y, seed, p, scale, D, BLOCK=triton.next_power_of_2(D))",
    ),
    ("tl.load(seed)", "seed"),
    ("ctx.seed = p, seed_tensor(seed, x.device)", "ctx.seed = p, seed"),
)

VARIANTS = [
    right(),
    right("by_rows_with_a_seed_of_the_host", *BY_ROWS),
    # All rows share a mask.
    wrong(
        "random_number_by_column",
        *BY_ROWS,
        ("place.to(tl.int32)) >= p", "column) >= p"),
        fault="constant",
        result="y",
    ),
    # All calls share the memory of the seed: the next call's seed draws the mask of the gradient.
    wrong(
        "seed_in_memory_of_all_calls",
        (
            "def seed_tensor(seed, device):\n    return torch.full((1,), seed, dtype=torch.int64, device=device)\n",
            """\
SEEDS = {}


def seed_tensor(seed, device):
    if device not in SEEDS:
        SEEDS[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return SEEDS[device].fill_(seed)
""",
        ),
        fault="stale state",
    ),
]
