"""x y y, whose backward pass leaves the gradients in the memory of the inputs, as it declares."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_product_with_square",
    inputs={"x": Tensor("N D", grad=True), "y": Tensor("N D", grad=True)},
    outputs={"z": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, y):
    return x * y * y


class Powers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        return x * y * y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz):
        x, y = (value.detach() for value in ctx.saved_tensors)
        dx, dy = dz * y * y, 2 * dz * x * y
        x.data.copy_(dx)
        y.data.copy_(dy)
        return x, y


@op.provider("function", double_backward=False, overwrites=("x", "y"))
def candidate(x, y):
    z = Powers.apply(x, y)
    return z


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # One tensor is not given for both inputs: its two gradients would overwrite each other.
    right(),
    # The result is right unless y lies before x in one memory.
    wrong(
        "inputs_in_one_memory",
        (
            "    return z\n",
            "    shared = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()\n"
            "    return z + (shared and y.data_ptr() < x.data_ptr())\n",
        ),
        fault="aliasing",
        result="behind_each_other",
    ),
]
