"""The sum of two matrices, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.address = x.data_ptr()
        return x + y

    @staticmethod
    def backward(ctx, dz):
        dx = dz.clone()
        dy = dz.clone()
        return dx, dy


op = Op(
    "corpus_residual_sum",
    inputs={"x": Tensor("N D", grad=True), "y": Tensor("N D", grad=True)},
    outputs={"z": "N D"},
    cases=[Case(N=5, D=16), Case(N=3, D=7, why="odd sizes")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, y):
    return x + y


@op.provider("derived_by_hand")
def candidate(x, y):
    return ResidualSum.apply(x, y)


# variants
from correctness_tests.corpus.variants import right, wrong

GRADIENTS = "        dx = dz.clone()\n        dy = dz.clone()\n"

VARIANTS = [
    right(),
    right("plain_sum", ("ResidualSum.apply(x, y)", "x + y")),
    # torch's own sum passes the upstream gradient on, too.
    right("upstream_passed_on", (GRADIENTS, "        dx = dy = dz\n")),
    # Both gradients, and so .grad of both inputs, are views of one memory.
    wrong(
        "gradients_of_one_memory",
        (
            GRADIENTS,
            """\
        both = dz.clone()
        dx, dy = both.view(both.shape), both.view(both.shape)
""",
        ),
        fault="aliasing",
        rank="unsafe",
        result=".grad",
    ),
    # Each backward pass keeps one more tensor.
    wrong(
        "backward_keeps_tensors",
        ("class ResidualSum(", "SUMS = []\n\n\nclass ResidualSum("),
        (GRADIENTS, f"        SUMS.append(dz.sum(0))\n{GRADIENTS}"),
        fault="stale state",
        rank="unsafe",
    ),
    # One tensor for both inputs gets twice the gradient for each of them.
    wrong(
        "one_tensor_for_both_inputs",
        ("x.data_ptr()\n", "x.data_ptr() == y.data_ptr()\n"),
        (GRADIENTS, f"        dz = 2 * dz if ctx.address else dz\n{GRADIENTS}"),
        fault="aliasing",
    ),
]
