"""The running sum of sines down the columns, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class RunningSine(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin().cumsum(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy.flip(0).cumsum(0).flip(0) * x.cos()


op = Op(
    "corpus_running_sine",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=16), Case(N=3, D=7, why="odd sizes")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.sin().cumsum(0)


@op.provider("derived_by_hand")
def candidate(x):
    return RunningSine.apply(x)


# variants
from correctness_tests.corpus.variants import right

BACKWARD = "        return dy.flip(0).cumsum(0).flip(0) * x.cos()\n"


def with_jvp(derivative):
    """The edit that adds a forward derivative."""
    return (
        BACKWARD,
        f"""\
{BACKWARD}
    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return (tangent * {derivative}).cumsum(0)
""",
    )


def with_vmap(result):
    """The edit that adds a rule for torch.vmap."""
    return (
        BACKWARD,
        f"""\
{BACKWARD}
    @staticmethod
    def vmap(info, in_dims, x):
        return {result}
""",
    )


VARIANTS = [
    right(),
    right("plain", ("return RunningSine.apply(x)\n", "return x.sin().cumsum(0)\n")),
    right("cosine_as_forward_derivative", with_jvp("x.cos()")),
    right(
        "batch_of_vmap_last",
        with_vmap("RunningSine.apply(x.movedim(in_dims[0], -1)), -1"),
    ),
]
