"""The third power of each element."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_cube",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x**3


@op.provider("written_out")
def candidate(x):
    return x * x * x


# variants
from correctness_tests.corpus.variants import right

CUSTOM = """@torch.library.custom_op("corpus::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, upstream: 3 * ctx.saved_tensors[0] ** 2 * upstream,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@op.provider("written_out")
def candidate(x):
    return cube(x)
"""

VARIANTS = [
    right(),
]
