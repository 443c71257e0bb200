"""A product of elements with a backward pass of its own, which cannot be differentiated again."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_product_with_backward",
    inputs={"x": Tensor("N D", grad=True), "y": Tensor("N D", grad=True)},
    outputs={"z": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, y):
    return x * y


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        return torch.mul(x, y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz):
        x, y = ctx.saved_tensors
        dx, dy = dz * y, dz * x
        return dx, dy


@op.provider("function", double_backward=False)
def candidate(x, y):
    return Product.apply(x, y)


# variants
from correctness_tests.corpus.variants import right, wrong

ONCE = "    @torch.autograd.function.once_differentiable\n"
RETURN = "        return dx, dy\n"
OVERWRITTEN = """        x.detach().copy_(dx)
        y.detach().copy_(dy)
        return x.detach(), y.detach()
"""
DECLARED = ("double_backward=False)", 'double_backward=False, overwrites=("x", "y"))')

VARIANTS = [
    right(),
    # A second derivative that is right is there, and not declared.
    wrong(
        "second_derivative_not_declared",
        (ONCE, ""),
        fault="gradient missing",
        rank="refused",
        result="gives one",
    ),
    right("second_derivative_declared", (ONCE, ""), (", double_backward=False", "")),
    # A second derivative is lost without an error.
    wrong(
        "gradients_detached",
        (ONCE, ""),
        (RETURN, "        return dx.detach(), dy.detach()\n"),
        fault="gradient missing",
        rank="warning",
    ),
    # What a reference raises is not the candidate's fault.
    right(
        "reference_raises_in_backward",
        ("    return x * y\n", "    return Broken.apply(x, y)\n"),
        (
            "class Product(",
            """class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, dz):
        raise RuntimeError("the reference is broken")


class Product(""",
        ),
    ),
    # Gradients lie in the memory of the inputs, by design.
    right(
        "overwrites_its_inputs",
        (RETURN, OVERWRITTEN),
        DECLARED,
    ),
    wrong(
        "overwrites_its_inputs_undeclared",
        (RETURN, OVERWRITTEN),
        fault="aliasing",
        rank="unsafe",
    ),
    wrong(
        "overwrites_its_inputs_and_adds_one",
        ("dz * y, dz * x", "dz * y + 1, dz * x"),
        (RETURN, OVERWRITTEN),
        DECLARED,
        fault="constant",
        result="grad x",
    ),
    wrong(
        "gradient_of_y_missing",
        (RETURN, "        return dx, None\n"),
        fault="gradient missing",
        result="grad y",
    ),
]
