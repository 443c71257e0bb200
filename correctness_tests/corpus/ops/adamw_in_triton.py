"""A step of AdamW in place, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import normal, uniform


@triton.jit
def step_kernel(p, g, m, v, n, lr, b1, b2, d1, d2, eps, decay, c1, c2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(p + at, mask=inside, other=0.0)
    slope = tl.load(g + at, mask=inside, other=0.0)
    first = tl.load(m + at, mask=inside, other=0.0)
    second = tl.load(v + at, mask=inside, other=0.0)
    first = b1 * first + d1 * slope
    second = b2 * second + d2 * slope * slope
    weight = weight * (1.0 - lr * decay)
    weight -= lr * (first / c1) / (tl.sqrt(second / c2) + eps)
    tl.store(p + at, weight, mask=inside)
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)


op = Op(
    "corpus_adamw_in_triton",
    inputs={
        "p": Tensor("P", mutated=True),
        "g": Tensor("P"),
        "m": Tensor("P", mutated=True, values=normal(0.1)),
        "v": Tensor("P", mutated=True, values=uniform(0.0, 1.0)),
    },
    params={"lr": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "decay": 0.01, "step": 5},
    outputs={},
    calls=3,
    dtypes=(torch.float32,),
    cases=[Case(P=64), Case(P=1000, why="several blocks, the last of them ragged")],
)


@op.reference
def eager(p, g, m, v, lr, b1, b2, eps, decay, step):
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).add_(g * g, alpha=1 - b2)
    p.mul_(1 - lr * decay)
    p.sub_(lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps))


@op.independent("written as sums of products")
def written_out(p, g, m, v, lr, b1, b2, eps, decay, step):
    m.copy_(b1 * m + (1 - b1) * g)
    v.copy_(b2 * v + (1 - b2) * g.square())
    p.copy_(p - lr * decay * p - lr * m / (1 - b1**step) / (torch.sqrt(v / (1 - b2**step)) + eps))


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(p, g, m, v, lr, b1, b2, eps, decay, step):
    state = p, m, v
    dense = [tensor.contiguous() for tensor in state]
    if n := p.numel():
        step_kernel[(triton.cdiv(n, 256),)](
            *(dense[0], g.contiguous(), dense[1], dense[2], n),
            *(lr, b1, b2, 1 - b1, 1 - b2, eps, decay, 1 - b1**step, 1 - b2**step),
            BLOCK=256,
        )
    for tensor, result in zip(state, dense, strict=True):
        if result is tensor:
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(result)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # With tiny gradients, the step is far too small.
    wrong(
        "epsilon_under_the_root",
        ("(tl.sqrt(second / c2) + eps)", "tl.sqrt(second / c2 + eps)"),
        fault="constant",
        result="p",
    ),
    # The factor is near 1 and arrives in float32, so that 1 less it has few right digits.
    wrong(
        "one_less_beta_in_float32",
        ("d2 * slope * slope", "(1.0 - b2) * slope * slope"),
        fault="accumulation",
        open="within what rounding the parameters to float32 explains",
        result="p",
    ),
]
